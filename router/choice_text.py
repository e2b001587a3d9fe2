"""The text of one choice: detokenised, watched for stop strings, released once sure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from kvferry.core.request import FinishReason, TextDelta, TokenLogprob, TokenStep
from kvferry.router.detokenizer import Detokenizer
from kvferry.router.intake import PreparedPrompt, TextCodec
from kvferry.router.stop_strings import StopStrings

IMPOSSIBLE = -9999.0
"""Stands for the log-probability of a token that cannot be drawn; JSON has no infinity."""


class ChoiceText:
    """Turns the steps of one choice into deltas.

    Tokens and log-probabilities leave with their text: what a stop string holds back or cuts does
    not show in them. The first ``min_tokens`` tokens are not searched for stop strings, and their
    text is never cut. The text of a token that ended the choice (end of sequence, or one of
    ``stop_token_ids``) is left out.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_index",
        "_produced",
        "_released",
        "_sampling",
        "_stops",
        "num_tokens",
    )

    def __init__(self, codec: TextCodec, prompt: PreparedPrompt, index: int) -> None:
        self._index = index
        self._sampling = prompt.request.sampling
        self._detokenizer = Detokenizer(
            codec, prompt.request.prompt_token_ids, prompt_is_text=prompt.text is not None
        )
        self._stops = StopStrings(self._sampling.stop)
        self._held: deque[tuple[int, int, TokenLogprob | None]] = deque()
        """(where its text begins, token id, logprob) of each token that was not released."""
        self._produced = 0
        self._released = 0
        self.num_tokens = 0

    def feed(self, step: TokenStep) -> TextDelta:
        """What the step adds. It has a finish reason when the engine or a stop string ended it."""
        text = ""
        for i, token_id in enumerate(step.token_ids):
            self.num_tokens += 1
            logprob = _finite(step.logprobs[i]) if i < len(step.logprobs) else None
            self._held.append((self._produced, token_id, logprob))
            ends = step.finish_reason is FinishReason.STOP and i == len(step.token_ids) - 1
            piece = "" if ends else self._detokenizer.feed(token_id)
            released, stop = self._release(piece)
            text += released
            if stop is not None:
                return self._delta(text, FinishReason.STOP, stop)
        if step.finish_reason is None:
            return self._delta(text, None, None)
        released, stop = self._release(self._detokenizer.finish())
        text += released
        if stop is not None:
            return self._delta(text, FinishReason.STOP, stop)
        rest = self._stops.flush()
        self._released += len(rest)
        return self._delta(text + rest, step.finish_reason, self._stop_token(step))

    def _release(self, piece: str) -> tuple[str, str | None]:
        self._produced += len(piece)
        stop = None
        if self.num_tokens > self._sampling.min_tokens:
            piece, stop = self._stops.feed(piece)
        self._released += len(piece)
        return piece, stop

    def _delta(
        self, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> TextDelta:
        tokens = []
        while self._held and self._is_shown(self._held[0][0], finish_reason, stop_reason):
            tokens.append(self._held.popleft())
        return TextDelta(
            index=self._index,
            text=text,
            token_ids=tuple(token_id for _, token_id, _ in tokens),
            logprobs=tuple(logprob for *_, logprob in tokens if logprob is not None),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _is_shown(
        self, begin: int, finish_reason: FinishReason | None, stop_reason: str | int | None
    ) -> bool:
        """Whether the oldest held token may leave: its text has, or as much of it as ever will."""
        if isinstance(stop_reason, str):
            return begin < self._released
        if finish_reason is not None:
            return True
        end = self._held[1][0] if len(self._held) > 1 else self._produced
        return end <= self._released

    def _stop_token(self, step: TokenStep) -> int | None:
        token_id = step.token_ids[-1] if step.token_ids else None
        stopped = step.finish_reason is FinishReason.STOP
        return token_id if stopped and token_id in self._sampling.stop_token_ids else None


def _finite(entry: TokenLogprob) -> TokenLogprob:
    values = (entry.logprob, *(logprob for _, logprob in entry.top))
    if all(math.isfinite(value) for value in values):
        return entry
    logprob, *tops = (value if math.isfinite(value) else IMPOSSIBLE for value in values)
    top = tuple(zip((token for token, _ in entry.top), tops, strict=True))
    return replace(entry, logprob=logprob, top=top)
