"""What a request must answer, computed one token at a time by the book: dense logits, no cache, no
batch, no kernels. Slow, and written apart from the engine's own edits and filters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tiny_models import our_logits, reference_logits
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvferry.core.request import FinishReason, TokenLogprob
from kvferry.core.sampling import SamplingParams
from kvferry.kernels.sampling.philox import neg_log_exponential, uniform_words

AllLogits = Callable[[Sequence[int]], Tensor]
"""Tokens [T] -> logits [T, V] of what follows each."""
NextLogits = Callable[[Sequence[int]], Tensor]
"""Tokens so far -> logits [V] of the next one."""


@dataclass(slots=True)
class Answer:
    """Output of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def transformers_logits(model: PreTrainedModel) -> AllLogits:
    return lambda tokens: reference_logits(model, torch.tensor(tokens))


def decoder_logits(decoder: nn.Module) -> AllLogits:
    """Our own model, with dense attention."""
    return lambda tokens: our_logits(decoder, torch.tensor(tokens))


def next_logits(model: AllLogits, likely: Sequence[int] = ()) -> NextLogits:
    """The last row of ``model``. While the tokens are those of ``likely``, one run serves them
    all.
    """
    rows = model(likely) if likely else torch.empty(0)

    def last(tokens: Sequence[int]) -> Tensor:
        known = list(tokens) == list(likely[: len(tokens)])
        return rows[len(tokens) - 1] if known else model(tokens)[-1]

    return last


def reference_answer(
    following: NextLogits,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos: Sequence[int] = (),
    sample_index: int = 0,
) -> Answer:
    """All tokens up to a stop rule or ``params.max_tokens``."""
    assert params.max_tokens is not None
    answer = Answer()
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    while answer.finish_reason is None:
        tokens = [*prompt, *answer.token_ids]
        logits = following(tokens).double()
        may_stop = len(answer.token_ids) >= params.min_tokens
        edited = _edited(logits, prompt, answer.token_ids, params, set() if may_stop else stops)
        token = _choose(edited, params, sample_index, len(tokens))
        answer.token_ids.append(token)
        answer.logprobs.append(_logprobs(logits, token, params.logprobs or 0))
        count = len(answer.token_ids)
        if token in stops and count >= params.min_tokens:
            answer.finish_reason = FinishReason.STOP
        elif count == params.max_tokens:
            answer.finish_reason = FinishReason.LENGTH
    return answer


def probabilities(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """Token id -> probability after temperature and filters; ids that were filtered out lack."""
    scaled = (logits.double() / _wire(params.temperature)).tolist()
    finite = (token for token, value in enumerate(scaled) if value > -math.inf)
    kept = sorted(finite, key=lambda token: -scaled[token])
    if params.top_k:
        least = scaled[kept[min(params.top_k, len(kept)) - 1]]
        kept = [token for token in kept if scaled[token] >= least]
    if params.top_p < 1:
        weights, total = _softmax(scaled, kept), 0.0
        for i, token in enumerate(kept):
            total += weights[token]
            if total >= _wire(params.top_p):
                kept = kept[: i + 1]
                break
    if params.min_p:
        weights = _softmax(scaled, kept)
        floor = _wire(params.min_p) * weights[kept[0]]
        kept = [token for token in kept if weights[token] >= floor]
    return _softmax(scaled, kept)


def _edited(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    banned: set[int],
) -> Tensor:
    values = logits.tolist()
    repetition = _wire(params.repetition_penalty)
    for token in {*prompt, *output}:
        values[token] *= repetition if values[token] < 0 else 1 / repetition
    for token in output:
        values[token] -= _wire(params.frequency_penalty)
    for token in set(output):
        values[token] -= _wire(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        values[token] += _wire(bias)
    for token in banned:
        values[token] = -math.inf
    return torch.tensor(values, dtype=torch.float64)


def _choose(logits: Tensor, params: SamplingParams, sample_index: int, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    candidates = probabilities(logits, params)
    ids = torch.tensor([list(candidates)])
    seed = np.array([(params.seed or 0) % 2**64], np.uint64).view(np.int64)
    words = uniform_words(
        torch.from_numpy(seed), torch.tensor([sample_index]), torch.tensor([position]), ids
    )
    noise = neg_log_exponential(words)[0].tolist()
    scores = [math.log(p) + n for p, n in zip(candidates.values(), noise, strict=True)]
    return int(ids[0, scores.index(max(scores))])


def _logprobs(logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits, -1)
    best = sorted(range(len(logprobs)), key=lambda t: -float(logprobs[t]))[:num_top]
    top = tuple((t, float(logprobs[t])) for t in best)
    return TokenLogprob(token, float(logprobs[token]), top)


def _softmax(scaled: Sequence[float], kept: Sequence[int]) -> dict[int, float]:
    most = max(scaled[token] for token in kept)
    weights = {token: math.exp(scaled[token] - most) for token in kept}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _wire(value: float) -> float:
    """As the session carries it: in single precision."""
    return float(np.float32(value))
