"""Sampling parameters: one model, validated once, for every API.

Ranges follow the OpenAI API where it has the parameter, and vLLM's and SGLang's meaning elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvferry.core.errors import InvalidRequest

MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20

Finite = Annotated[float, Field(allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0, allow_inf_nan=False)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class SamplingParams(BaseModel):
    """How tokens are drawn and when a sequence ends. Immutable; checked when it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_tokens: int | None = Field(
        None, ge=1, description="Output tokens at most; None: up to the context limit."
    )
    min_tokens: int = Field(
        0, ge=0, description="No stop rule fires before this many output tokens."
    )
    temperature: float = Field(
        1.0, ge=0.0, le=100.0, allow_inf_nan=False, description="0 is greedy."
    )
    top_k: int = Field(0, ge=0, lt=2**31, description="Keep the k most likely tokens; 0 keeps all.")
    top_p: float = Field(1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    min_p: float = Field(0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="None: the router draws one.")
    n: int = Field(
        1, ge=1, le=MAX_CHOICES, description="Choices per prompt, each its own sample index."
    )
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    stop: tuple[StopString, ...] = Field((), max_length=MAX_STOP_STRINGS)
    stop_token_ids: tuple[int, ...] = Field((), max_length=MAX_STOP_STRINGS)
    ignore_eos: bool = False
    logit_bias: dict[int, Bias] = Field(default_factory=dict, max_length=MAX_LOGIT_BIAS)
    logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Top log-probabilities per token; None: no log-probabilities.",
    )

    @field_validator("stop", "stop_token_ids", mode="before")
    @classmethod
    def _tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must not be greater than max_tokens")
        return self

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that the tokenizer does not have. Raises InvalidRequest."""
        for token in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"logit_bias.{token}", f"token id must be in [0, {vocab_size})"
                )
        for i, token in enumerate(self.stop_token_ids):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids[{i}]", f"token id must be in [0, {vocab_size})"
                )


def parse_sampling(values: dict[str, Any]) -> SamplingParams:
    """Make SamplingParams from plain values. Raises InvalidRequest naming the first wrong field."""
    try:
        return SamplingParams(**values)
    except ValidationError as error:
        raise first_invalid(error) from None


def first_invalid(error: ValidationError) -> InvalidRequest:
    """The first problem of a pydantic error as an InvalidRequest with the path of its field."""
    problem = error.errors(include_url=False)[0]
    path = ""
    for part in problem["loc"]:
        if part == "[key]":
            continue
        is_index = isinstance(part, int) and path not in ("", ".logit_bias")
        path += f"[{part}]" if is_index else f".{part}"
    message = problem["msg"].removeprefix("Value error, ")
    if not path and message.startswith("min_tokens"):
        path = "min_tokens"
    return InvalidRequest(path.lstrip(".") or "request", message)
