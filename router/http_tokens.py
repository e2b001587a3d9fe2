"""``/tokenize`` and ``/detokenize``, as load generators expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.router.intake import Intake
from kvferry.router.openai_messages import parse_messages


async def tokenize_body(intake: Intake, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of ``prompt``, or of ``messages`` as a chat. Raises InvalidRequest."""
    intake.check_model(body.get("model"))
    if "messages" in body:
        messages, _ = parse_messages(body["messages"])
        tokens = await intake.encode_chat(messages)
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise InvalidRequest("prompt", "must be a text")
        tokens = await intake.encode(prompt, "prompt")
    return {"count": len(tokens), "max_model_len": intake.max_model_len, "tokens": tokens}


async def detokenize_body(intake: Intake, body: Mapping[str, Any]) -> dict[str, Any]:
    """Text of ``tokens``. Raises InvalidRequest."""
    intake.check_model(body.get("model"))
    tokens = body.get("tokens")
    if not isinstance(tokens, list):
        raise InvalidRequest("tokens", "must be a list of token ids")
    checked = intake.check_token_ids(tokens, "tokens")
    return {"prompt": await asyncio.to_thread(intake.codec.decode, checked)}
