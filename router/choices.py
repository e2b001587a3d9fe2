"""From prompts to text: runs every choice and merges what they say into one stream.

NOTE: each choice is one task that follows the engine's steps and leaves its text in a mailbox. The
mailbox joins what one choice adds until the client takes it, so it holds at most one delta per
choice, a slow client slows nothing but itself, and no task ever waits for a client. Whichever way
the stream is left - at its end, by an error, by ``aclose``, by cancellation - every choice is
cancelled and awaited first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from kvferry.core.errors import DeadlineExceeded, ProtocolError
from kvferry.core.request import TextDelta, Timeline, Usage
from kvferry.router.choice_text import ChoiceText
from kvferry.router.engine import TokenEngine
from kvferry.router.intake import PreparedPrompt, TextCodec
from kvferry.router.siblings import Siblings


class _Mailbox:
    """What all choices have for the client and it has not taken yet."""

    __slots__ = ("_changed", "_error", "_open_choices", "_pending")

    def __init__(self, num_choices: int) -> None:
        self._open_choices = num_choices
        self._pending: dict[int, TextDelta] = {}
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, delta: TextDelta) -> None:
        earlier = self._pending.get(delta.index)
        self._pending[delta.index] = delta if earlier is None else _joined(earlier, delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._changed.set()

    async def take(self) -> list[TextDelta]:
        """All that waits; [] when every choice has ended. Raises the first error, after text."""
        if not self._open_choices:
            return []
        await self._changed.wait()
        self._changed.clear()
        deltas = list(self._pending.values())
        self._pending.clear()
        if self._error is not None:
            if not deltas:
                raise self._error
            self._changed.set()
        self._open_choices -= sum(delta.finish_reason is not None for delta in deltas)
        return deltas


async def generate_text(
    engine: TokenEngine, codec: TextCodec, prompts: Sequence[PreparedPrompt]
) -> AsyncGenerator[TextDelta, None]:
    """Stream the choices of all prompts, numbered prompt by prompt. Use under ``aclosing``.

    The last delta of each choice has its finish reason and timeline. Raises KvferryError, after the
    text that preceded it; DeadlineExceeded when a request's deadline passes first.
    """
    numbered = [choice for prompt in prompts for choice in _choices(prompt)]
    mailbox = _Mailbox(len(numbered))
    # Entered and left by hand: a TaskGroup's own exit would wrap this generator's GeneratorExit in
    # a group.
    group = asyncio.TaskGroup()
    await group.__aenter__()
    tasks = []
    try:
        for index, choice in enumerate(numbered):
            text = ChoiceText(codec, choice.prompt, index)
            tasks.append(group.create_task(_deliver(engine, choice, text, mailbox)))
        while deltas := await mailbox.take():
            for delta in deltas:
                yield delta
    finally:
        for task in tasks:
            task.cancel()
        await group.__aexit__(None, None, None)


class UsageMeter:
    """Counts the tokens of a whole request from its deltas."""

    def __init__(self, prompts: Sequence[PreparedPrompt]) -> None:
        self._choices_per_prompt = prompts[0].num_choices
        prompt_tokens = sum(len(prompt.request.prompt_token_ids) for prompt in prompts)
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def add(self, delta: TextDelta) -> None:
        """A delta's tokens; with the last one of a choice, also those that no delta showed."""
        usage = self.usage
        before = usage.by_choice.get(delta.index, 0)
        now = before + len(delta.token_ids)
        if delta.timeline is not None:
            now = delta.timeline.output_tokens
            if delta.index % self._choices_per_prompt == 0:
                # The choices of one prompt share it, so it counts once.
                usage.cached_tokens += delta.timeline.cached_tokens_prefill
        usage.by_choice[delta.index] = now
        usage.completion_tokens += now - before


class _Choice(NamedTuple):
    prompt: PreparedPrompt
    sample_index: int
    siblings: Siblings | None


def _choices(prompt: PreparedPrompt) -> list[_Choice]:
    count = prompt.num_choices
    siblings = Siblings(count) if count > 1 else None
    return [_Choice(prompt, index, siblings) for index in range(count)]


async def _deliver(
    engine: TokenEngine, choice: _Choice, text: ChoiceText, mailbox: _Mailbox
) -> None:
    """Run one choice to its end; leave its deltas, or the error that ended it, in the mailbox."""
    limit_s = choice.prompt.request.deadline_s
    try:
        async with asyncio.timeout(limit_s):
            await _run_choice(engine, choice, text, mailbox)
    except TimeoutError:
        mailbox.fail(DeadlineExceeded(f"the deadline of {limit_s:.3g} s has passed"))
    except Exception as error:
        # Nothing is hidden: whoever reads the stream gets it. Raised here, the group would cancel
        # that reader wherever it is, and gRPC cannot end a call in the middle of a write.
        mailbox.fail(error)


async def _run_choice(
    engine: TokenEngine, choice: _Choice, text: ChoiceText, mailbox: _Mailbox
) -> None:
    request = choice.prompt.request
    timeline = Timeline(prompt_tokens=len(request.prompt_token_ids))
    last: TextDelta | None = None
    # Leaving the block before the engine's last step, as a stop string does, stops the choice on
    # the workers.
    tokens = engine.generate(request, choice.sample_index, timeline, choice.siblings)
    async with aclosing(tokens) as steps:
        async for step in steps:
            delta = text.feed(step)
            if delta.finish_reason is not None:
                last = delta
                break
            if delta.token_ids or delta.text:
                mailbox.put(delta)
    if last is None:
        raise ProtocolError("the engine ended a choice without a finish reason")
    timeline.output_tokens = text.num_tokens
    mailbox.put(replace(last, timeline=timeline))


def _joined(earlier: TextDelta, later: TextDelta) -> TextDelta:
    return replace(
        later,
        text=earlier.text + later.text,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
    )
