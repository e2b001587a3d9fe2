"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.core.request import TokenLogprob
from kvferry.router.intake import TextCodec


def chat_logprobs(codec: TextCodec, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    content = []
    for entry in logprobs:
        shown = _chat_entry(codec, entry.token_id, entry.logprob)
        shown["top_logprobs"] = [_chat_entry(codec, *candidate) for candidate in entry.top]
        content.append(shown)
    return {"content": content, "refusal": None}


def completion_logprobs(
    codec: TextCodec, logprobs: Sequence[TokenLogprob], offset: int
) -> tuple[dict[str, Any], int]:
    """``choices[].logprobs`` of a completion, and the text offset after them.

    ``offset``: characters of the choice's text before the first of these tokens.
    """
    shown: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for entry in logprobs:
        text = _text(codec, entry.token_id)
        shown["tokens"].append(text)
        shown["token_logprobs"].append(entry.logprob)
        shown["top_logprobs"].append(_top_by_text(codec, entry))
        shown["text_offset"].append(offset)
        offset += len(text)
    return shown, offset


def _top_by_text(codec: TextCodec, entry: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        # Two tokens may have one text; the likelier one comes first and stays.
        top.setdefault(_text(codec, token_id), logprob)
    return top


def _chat_entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    text = _text(codec, token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _text(codec: TextCodec, token_id: int) -> str:
    return codec.decode((token_id,), skip_special_tokens=False)
