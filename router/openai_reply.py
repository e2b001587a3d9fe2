"""Answers in the two shapes of the OpenAI API, whole or as server-sent events.

NOTE: what is equal in all chunks of a stream is encoded once, so a chunk costs one short JSON
encoding and one join.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.core.request import TextDelta, TokenLogprob, Usage
from kvferry.router.intake import TextCodec
from kvferry.router.openai_fields import StreamOptions
from kvferry.router.openai_logprobs import chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.encode


def usage_body(usage: Usage) -> dict[str, Any]:
    """``usage`` of a reply."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Reply:
    """What both shapes share. A reply either streams (``event``) or gathers (``add``, ``body``)."""

    kind = ""
    chunk_kind = ""
    id_prefix = ""

    def __init__(
        self, codec: TextCodec, model_name: str, options: StreamOptions, *, with_logprobs: bool
    ) -> None:
        self._codec = codec
        self._options = options
        self._with_logprobs = with_logprobs
        self._parts: dict[int, list[TextDelta]] = {}
        self._identity = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model_name,
        }
        head = encode_json(self._identity | {"object": self.chunk_kind})
        self._head = b"data: " + head[:-1]
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"

    def event(self, delta: TextDelta, usage: Usage) -> bytes:
        """The event for one delta; b"" when it shows nothing yet."""
        choices = self._chunk_choices(delta)
        if not choices:
            return b""
        tail = self._tail
        if self._options.usage_in_every_chunk:
            tail = b',"usage":' + encode_json(usage_body(usage)) + b"}\n\n"
        return b"".join((self._head, b',"choices":', encode_json(choices), tail))

    def last_event(self, usage: Usage) -> bytes:
        """The event that ends a stream, after the token counts when they were asked for."""
        if not self._options.include_usage:
            return DONE
        counts = encode_json(usage_body(usage))
        return b"".join((self._head, b',"choices":[],"usage":', counts, b"}\n\n", DONE))

    def add(self, delta: TextDelta) -> None:
        """Gather one delta of an answer that is sent whole."""
        self._parts.setdefault(delta.index, []).append(delta)

    def body(self, usage: Usage) -> bytes:
        """The whole answer as JSON."""
        choices = []
        for index in sorted(self._parts):
            parts = self._parts[index]
            text = "".join(part.text for part in parts)
            logprobs = tuple(entry for part in parts for entry in part.logprobs)
            shown = self._whole_choice(index, text, logprobs)
            last = parts[-1]
            choices.append(shown | _ending(last))
        return encode_json(self._identity | {"choices": choices, "usage": usage_body(usage)})

    def _chunk_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        raise AssertionError("each shape has its own")

    def _whole_choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        raise AssertionError("each shape has its own")


class CompletionReply(Reply):
    """``/v1/completions``. ``echo``: per choice, the prompt's text that goes before the answer."""

    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        codec: TextCodec,
        model_name: str,
        options: StreamOptions,
        *,
        with_logprobs: bool,
        echo: Sequence[str] = (),
    ) -> None:
        super().__init__(codec, model_name, options, with_logprobs=with_logprobs)
        self._echo = dict(enumerate(echo))
        self._offsets: dict[int, int] = {}

    def _chunk_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        text = self._echo.pop(delta.index, "") + delta.text
        shows_logprobs = self._with_logprobs and delta.logprobs
        if not text and not shows_logprobs and delta.finish_reason is None:
            return []
        logprobs = None
        if shows_logprobs:
            offset = self._offsets.get(delta.index, 0)
            logprobs, end = completion_logprobs(self._codec, delta.logprobs, offset)
            self._offsets[delta.index] = end
        choice = {"index": delta.index, "text": text, "logprobs": logprobs}
        return [choice | _ending(delta)]

    def _whole_choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        shown = None
        if self._with_logprobs:
            shown, _ = completion_logprobs(self._codec, logprobs, 0)
        return {"index": index, "text": self._echo.get(index, "") + text, "logprobs": shown}


class ChatReply(Reply):
    """``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self, codec: TextCodec, model_name: str, options: StreamOptions, *, with_logprobs: bool
    ) -> None:
        super().__init__(codec, model_name, options, with_logprobs=with_logprobs)
        self._begun: set[int] = set()

    def _chunk_choices(self, delta: TextDelta) -> list[dict[str, Any]]:
        shown: dict[str, Any] = {}
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            shown = {"role": "assistant", "content": delta.text}
        elif delta.text:
            shown = {"content": delta.text}
        shows_logprobs = self._with_logprobs and delta.logprobs
        if not shown and not shows_logprobs and delta.finish_reason is None:
            return []
        logprobs = chat_logprobs(self._codec, delta.logprobs) if shows_logprobs else None
        choice = {"index": delta.index, "delta": shown, "logprobs": logprobs}
        return [choice | _ending(delta)]

    def _whole_choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob]
    ) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        shown = chat_logprobs(self._codec, logprobs) if self._with_logprobs else None
        return {"index": index, "message": message, "logprobs": shown}


def _ending(delta: TextDelta) -> dict[str, Any]:
    ending: dict[str, Any] = {"finish_reason": delta.finish_reason}
    if delta.finish_reason is not None:
        ending["stop_reason"] = delta.stop_reason
    return ending
