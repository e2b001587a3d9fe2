"""Fields of an OpenAI-style body: one table says what each becomes, is refused, or is ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest

_TOKEN_ID_KEY = re.compile(r"-?[0-9]{1,10}")

SAMPLING_FIELDS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "n": "n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
}
"""Field of the body -> field of SamplingParams."""

NO_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Known to the OpenAI API, and without any bearing on the answer here."""

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that would change the answer -> the values that ask for what is done anyway."""

OWN_FIELDS = frozenset({"model", "stream", "stream_options"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How the answer is delivered."""

    stream: bool = False
    include_usage: bool = False
    """A last chunk carries the token counts."""
    usage_in_every_chunk: bool = False


def parse_body(raw: bytes) -> dict[str, Any]:
    """Decode a JSON object; fields that are null count as absent. Raises InvalidRequest."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("body", "is nested too deeply") from None
    if not isinstance(body, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return {key: value for key, value in body.items() if value is not None}


def refuse_unsupported(
    body: Mapping[str, Any], others: Mapping[str, tuple[Any, ...]] | None = None
) -> None:
    """Refuse fields that would change the answer if they were understood. Raises InvalidRequest.

    ``others``: where an endpoint differs from NOT_SUPPORTED.
    """
    for name, harmless in (NOT_SUPPORTED | dict(others or {})).items():
        if name in body and not any(
            type(body[name]) is type(value) and body[name] == value for value in harmless
        ):
            raise InvalidRequest(name, "is not supported yet")
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise InvalidRequest("best_of", "is not supported yet, other than equal to n")


def sampling_values(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body's sampling fields under the names of SamplingParams. Raises InvalidRequest."""
    max_tokens = body.get("max_tokens")
    if max_tokens is not None and body.get("max_completion_tokens", max_tokens) != max_tokens:
        raise InvalidRequest("max_completion_tokens", "differs from max_tokens; give one")
    values = {inner: body[name] for name, inner in SAMPLING_FIELDS.items() if name in body}
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if isinstance(values.get("stop"), list):
        values["stop"] = tuple(values["stop"])
    if values.get("top_k") == -1:
        # Other engines write "all" as -1, and load generators send it.
        values["top_k"] = 0
    if "logit_bias" in values:
        values["logit_bias"] = _logit_bias(values["logit_bias"])
    return values


def stream_options(body: Mapping[str, Any]) -> StreamOptions:
    """Raises InvalidRequest."""
    stream = flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", "must be an object")
    if "stream_options" in body and not stream:
        raise InvalidRequest("stream_options", "is only allowed when stream is true")
    every = flag(options, "continuous_usage_stats", "stream_options.")
    return StreamOptions(
        stream=stream,
        include_usage=flag(options, "include_usage", "stream_options."),
        usage_in_every_chunk=every and flag(options, "include_usage", "stream_options."),
    )


def flag(values: Mapping[str, Any], name: str, prefix: str = "") -> bool:
    """A field that is true or false, and false when absent. Raises InvalidRequest."""
    value = values.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidRequest(f"{prefix}{name}", "must be true or false")
    return value


def ignored_fields(body: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Names in the body that nothing here reads, in their order."""
    read = OWN_FIELDS | NO_EFFECT | SAMPLING_FIELDS.keys() | NOT_SUPPORTED.keys() | set(known)
    return [name for name in body if name not in read and name != "best_of"]


def _logit_bias(raw: Any) -> dict[int, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequest("logit_bias", "must be an object of token id to bias")
    values = {}
    for key, bias in raw.items():
        if not _TOKEN_ID_KEY.fullmatch(key):
            raise InvalidRequest(f"logit_bias.{key[:40]}", "token id must be a whole number")
        values[int(key)] = bias
    return values
