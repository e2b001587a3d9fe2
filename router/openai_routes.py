"""The bodies of the two generating endpoints: each becomes prompts and the shape of the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core.errors import InvalidRequest
from kvferry.router.detokenizer import prompt_text
from kvferry.router.intake import Intake, PreparedPrompt
from kvferry.router.openai_fields import (
    flag,
    ignored_fields,
    refuse_unsupported,
    sampling_values,
    stream_options,
)
from kvferry.router.openai_messages import parse_messages
from kvferry.router.openai_reply import ChatReply, CompletionReply, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A validated body."""

    prompts: list[PreparedPrompt]
    reply: Reply
    stream: bool
    ignored: list[str]
    """Paths of the fields that nothing here knows."""


Prepare = Callable[[Intake, Mapping[str, Any]], Awaitable[Job]]


async def prepare_completion(intake: Intake, body: Mapping[str, Any]) -> Job:
    """``POST /v1/completions``. Raises InvalidRequest."""
    intake.check_model(body.get("model"))
    refuse_unsupported(body)
    options = stream_options(body)
    sampling = sampling_values(body)
    if "logprobs" in body:
        sampling["logprobs"] = body["logprobs"]
    echo = flag(body, "echo")
    if echo and "logprobs" in body:
        raise InvalidRequest("logprobs", "is not supported yet together with echo")
    if "prompt" not in body:
        raise InvalidRequest("prompt", "is required")
    prompts = await intake.completion(body["prompt"], sampling)
    reply = CompletionReply(
        intake.codec,
        intake.model_name,
        options,
        with_logprobs="logprobs" in body,
        echo=[_echo(intake, p) for p in prompts for _ in range(p.num_choices)] if echo else (),
    )
    ignored = ignored_fields(body, ("prompt", "echo", "logprobs"))
    return Job(prompts=prompts, reply=reply, stream=options.stream, ignored=ignored)


async def prepare_chat(intake: Intake, body: Mapping[str, Any]) -> Job:
    """``POST /v1/chat/completions``. Raises InvalidRequest."""
    intake.check_model(body.get("model"))
    # A chat template writes the special tokens itself, so none are added to its text.
    refuse_unsupported(body, {"add_special_tokens": (False,)})
    options = stream_options(body)
    messages, ignored = parse_messages(body.get("messages"))
    sampling = sampling_values(body)
    with_logprobs = flag(body, "logprobs")
    if with_logprobs:
        sampling["logprobs"] = body.get("top_logprobs", 0)
    elif "top_logprobs" in body:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    try:
        prompt = await intake.chat(messages, sampling)
    except InvalidRequest as error:
        raise _as_chat_field(error, with_logprobs) from None
    reply = ChatReply(intake.codec, intake.model_name, options, with_logprobs=with_logprobs)
    ignored += ignored_fields(body, ("messages", "logprobs", "top_logprobs"))
    return Job(prompts=[prompt], reply=reply, stream=options.stream, ignored=ignored)


def _as_chat_field(error: InvalidRequest, with_logprobs: bool) -> InvalidRequest:
    """Name the field as the client wrote it: the intake's logprobs is top_logprobs here."""
    if with_logprobs and error.field == "logprobs":
        return InvalidRequest("top_logprobs", error.message)
    return error


def _echo(intake: Intake, prompt: PreparedPrompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return prompt_text(intake.codec, prompt.request.prompt_token_ids)
