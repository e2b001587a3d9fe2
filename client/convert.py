"""Between core's types and the messages of the public gRPC API, on the client's side."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.request import FinishReason, TextDelta, Timeline, TokenLogprob, Usage
from kvferry.core.sampling import SamplingParams
from kvferry.proto import kvferry_pb2

_TIMELINE_FIELDS = tuple(kvferry_pb2.Timeline.DESCRIPTOR.fields_by_name)


def to_request(
    prompt: str | Sequence[int],
    sampling: SamplingParams | None,
    *,
    model: str = "",
    client_request_id: str = "",
) -> kvferry_pb2.GenerateRequest:
    """The message for one prompt, text or token ids. What is None keeps the router's default."""
    request = kvferry_pb2.GenerateRequest(model=model, client_request_id=client_request_id)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    if sampling is not None:
        request.sampling.CopyFrom(_sampling(sampling))
    return request


def to_delta(response: kvferry_pb2.GenerateResponse) -> TextDelta:
    """One message of the answer."""
    timeline = None
    if response.HasField("timeline"):
        values = {name: getattr(response.timeline, name) for name in _TIMELINE_FIELDS}
        timeline = Timeline(**values)
    finish = response.finish_reason
    return TextDelta(
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        logprobs=tuple(_logprob(entry) for entry in response.logprobs),
        finish_reason=FinishReason(finish) if finish else None,
        stop_reason=response.stop_string or None,
        timeline=timeline,
    )


def fill_usage(usage: Usage, response: kvferry_pb2.GenerateResponse) -> None:
    """Take over the token counts, if this message has them."""
    if response.HasField("usage"):
        usage.prompt_tokens = response.usage.prompt_tokens
        usage.completion_tokens = response.usage.completion_tokens
        usage.cached_tokens = response.usage.cached_tokens


def _sampling(sampling: SamplingParams) -> kvferry_pb2.SamplingParams:
    values = sampling.model_dump(exclude_none=True)
    if values.get("seed", 0) >= 2**63:
        # The message holds a signed number; seeds that differ by 2**64 are one seed.
        values["seed"] -= 2**64
    return kvferry_pb2.SamplingParams(**values)


def _logprob(entry: kvferry_pb2.TokenLogprob) -> TokenLogprob:
    top = tuple((candidate.token_id, candidate.logprob) for candidate in entry.top)
    return TokenLogprob(entry.token_id, entry.logprob, top)
