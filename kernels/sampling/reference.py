"""Sampling in plain torch: what the kernels compute, in float64.

R rows, V vocabulary ids, Q sequences. ``argmax(x - log E)`` over x = logits / temperature with E
exponentially distributed is a draw from softmax(x) (the exponential race, known as the Gumbel-max
trick; Maddison, Tarlow, Minka, "A* sampling", 2014). Verification is the rejection rule of
Leviathan, Kalman, Matias (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318), or coupled.
"""

from __future__ import annotations

import torch

from kvferry.kernels.sampling.philox import (
    ACCEPT_DOMAIN,
    RESIDUAL_DOMAIN,
    SAMPLE_DOMAIN,
    all_words,
    neg_log_exponential,
)
from kvferry.kernels.sampling.tensors import (
    IN_PROMPT,
    MAX_DRAFTS,
    DraftTensors,
    EditTensors,
    Penalties,
    RaggedIds,
    SampledTokens,
    SamplingTensors,
    TopLogprobs,
    VerifiedTokens,
)


def add_tokens(
    counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool
) -> None:
    """Count tokens [N] of slots [N] in ``counts`` [num_slots, V] in place, as part of the prompt or
    of the output. Negative slots and ids outside the vocabulary are ignored.
    """
    inside = (slots >= 0) & (token_ids >= 0) & (token_ids < counts.shape[1])
    index = (slots[inside].long(), token_ids[inside].long())
    if is_prompt:
        counts[index] |= IN_PROMPT
    else:
        counts.index_put_(index, torch.ones_like(index[0], dtype=torch.int32), accumulate=True)


def apply_edits(logits: torch.Tensor, edits: EditTensors, vocab_size: int) -> torch.Tensor:
    """Penalties, bias, bans and grammar, in this order: ``logits`` [R, >= V] -> float32 [R, V].

    What is forbidden becomes -inf. What is not finite becomes NaN, so that it is still seen.
    """
    raw = logits[:, :vocab_size].float()
    out = raw.clone()
    if edits.penalties is not None:
        out = _penalised(out, edits.penalties)
    if edits.bias is not None:
        row, column, index = _entries(edits.bias, vocab_size)
        assert edits.bias.values is not None
        out[row, column] += edits.bias.values[index]
    if edits.banned is not None:
        row, column, _ = _entries(edits.banned, vocab_size)
        out[row, column] = -torch.inf
    if edits.allowed_bits is not None:
        ids = torch.arange(vocab_size, device=logits.device)
        allowed = (edits.allowed_bits[:, ids // 32] >> (ids % 32)) & 1
        out.masked_fill_(allowed == 0, -torch.inf)
    return out.masked_fill_(~torch.isfinite(raw), torch.nan)


def _penalised(x: torch.Tensor, penalties: Penalties) -> torch.Tensor:
    packed = penalties.counts[penalties.slot.clamp(min=0).long()]
    packed = packed.masked_fill(penalties.slot.unsqueeze(1) < 0, 0)
    count = packed & ~IN_PROMPT
    repetition = penalties.repetition.unsqueeze(1)
    x = torch.where(packed != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    penalty = penalties.frequency.unsqueeze(1) * count + penalties.presence.unsqueeze(1)
    return torch.where(count > 0, x - penalty, x)


def _entries(ragged: RaggedIds, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row, id and place in the list of every id that is in the vocabulary."""
    rows = torch.arange(len(ragged.offsets) - 1, device=ragged.ids.device)
    row = rows.repeat_interleave(ragged.offsets.diff().long())
    ids = ragged.ids[: len(row)].long()
    index = ((ids >= 0) & (ids < vocab_size)).nonzero().flatten()
    return row[index], ids[index], index


def sample(
    logits: torch.Tensor, params: SamplingTensors, vocab_size: int, edited: bool = False
) -> SampledTokens:
    """Draw one token per row of ``logits`` [R, >= V]; the lowest id among equals.

    ``edited``: they come from ``apply_edits``, so that -inf is no mistake.
    """
    x, invalid = _checked(logits, vocab_size, edited)
    tokens = _race(_survivors(x, params), params, SAMPLE_DOMAIN)
    return SampledTokens(token_ids=tokens.masked_fill(invalid, 0), invalid=invalid)


def top_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, count: int, vocab_size: int
) -> TopLogprobs:
    """Log-softmax of raw ``logits`` [R, >= V] in ``rows`` int32 [M]: of the M ``token_ids`` int64,
    and of the ``count`` likeliest ids.
    """
    raw = logits[rows.long(), :vocab_size].double().log_softmax(dim=-1)
    values, ids = raw.sort(dim=-1, descending=True, stable=True)
    return TopLogprobs(
        chosen=raw.gather(1, token_ids.unsqueeze(1)).squeeze(1).float(),
        ids=ids[:, :count].int(),
        values=values[:, :count].float(),
    )


def verify_coupled(
    logits: torch.Tensor,
    params: SamplingTensors,
    drafts: DraftTensors,
    vocab_size: int,
    edited: bool = False,
) -> VerifiedTokens:
    """Keep drafts as long as they are what ``sample`` draws in their row; then what it draws.

    The tokens are those of a run without speculation, whatever the drafts are.
    """
    sampled = sample(logits, params, vocab_size, edited)
    return _kept(drafts, sampled.token_ids == drafts.token_ids, sampled)


def verify_rejection(
    logits: torch.Tensor,
    params: SamplingTensors,
    drafts: DraftTensors,
    vocab_size: int,
    edited: bool = False,
) -> VerifiedTokens:
    """Keep a draft d, drawn from q, with probability min(1, p(d) / q(d)), p being what ``sample``
    draws from; replace the first that is not kept by a draw from max(p - q, 0), normalised.

    The tokens have the target's distribution, whatever q is. Without drafts they are ``sample``'s.
    """
    x, invalid = _checked(logits, vocab_size, edited)
    kept = _survivors(x, params)
    p = kept.softmax(dim=-1)
    is_draft = _is_draft(drafts, len(logits))
    d = drafts.token_ids.masked_fill(~is_draft, 0).unsqueeze(1)
    if drafts.probs is None:
        q = torch.zeros_like(p).scatter_(1, d, 1.0)
    else:
        q = drafts.probs.double().masked_fill(~is_draft.unsqueeze(1), 0.0)
    words = all_words(params.seed, params.sample_index.long(), params.position, 1, ACCEPT_DOMAIN)
    uniform = (words[:, 0] >> 8).double() * 2.0**-24
    accept = uniform * q.gather(1, d).squeeze(1) < p.gather(1, d).squeeze(1)
    residual = (p - q).clamp(min=0.0)
    residual = residual.masked_fill(residual < torch.finfo(torch.float32).tiny, 0.0)
    # p = q up to float32's rounding leaves nothing to draw from: the likeliest, then.
    is_empty = residual.sum(dim=1, keepdim=True) == 0
    residual.scatter_add_(1, x.argmax(dim=1, keepdim=True), is_empty.to(residual.dtype))
    replacement = _race(residual.log(), params, RESIDUAL_DOMAIN)
    bonus = _race(kept, params, SAMPLE_DOMAIN)
    tokens = torch.where(is_draft, replacement, bonus).masked_fill(invalid, 0)
    return _kept(drafts, accept, SampledTokens(token_ids=tokens, invalid=invalid))


def _is_draft(drafts: DraftTensors, num_rows: int) -> torch.Tensor:
    is_draft = torch.ones(num_rows, dtype=torch.bool, device=drafts.offsets.device)
    is_draft[drafts.offsets[1:].long() - 1] = False
    return is_draft


def _kept(drafts: DraftTensors, accept: torch.Tensor, after: SampledTokens) -> VerifiedTokens:
    """Drafts up to the first row that does not accept or is a bonus row; then that row's token."""
    accept = accept & ~after.invalid & _is_draft(drafts, len(accept))
    starts, sizes = drafts.offsets[:-1].long(), drafts.offsets.diff()
    column = torch.arange(MAX_DRAFTS + 1, device=accept.device)
    row = starts.unsqueeze(1) + torch.minimum(column, sizes.unsqueeze(1) - 1)
    num_accepted = accept[row].int().cumprod(dim=1).sum(dim=1)
    last = starts + num_accepted
    tokens = drafts.token_ids[row].masked_fill(column >= num_accepted.unsqueeze(1), 0)
    tokens[torch.arange(len(last), device=last.device), num_accepted] = after.token_ids[last]
    return VerifiedTokens(
        num_accepted=num_accepted.int(), token_ids=tokens, invalid=after.invalid[last]
    )


def _checked(
    logits: torch.Tensor, vocab_size: int, edited: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as float64 with zeros in invalid rows, and which these are."""
    x = logits[:, :vocab_size].double()
    bad = ~torch.isfinite(x) & ~((x == -torch.inf) & edited)
    invalid = bad.any(dim=-1)
    return x.masked_fill(invalid.unsqueeze(1), 0.0), invalid


def _survivors(x: torch.Tensor, params: SamplingTensors) -> torch.Tensor:
    """x / temperature where top-k, then top-p of what it leaves, then min-p let x through; else
    -inf. Ids that tie with the last to survive survive. A greedy row keeps its lowest best id.
    """
    greedy = (params.temperature <= 0).unsqueeze(1)
    best = torch.zeros_like(x, dtype=torch.bool).scatter_(1, x.argmax(dim=1, keepdim=True), True)
    x = x / params.temperature.double().masked_fill(params.temperature <= 0, 1.0).unsqueeze(1)
    falling = x.sort(dim=-1, descending=True).values
    k = params.top_k.long().unsqueeze(1)
    by_k = falling.gather(1, k.clamp(1, x.shape[1]) - 1).masked_fill(k == 0, -torch.inf)
    mass = falling.masked_fill(falling < by_k, -torch.inf).softmax(dim=-1)
    p = params.top_p.double().unsqueeze(1)
    nucleus = (mass.cumsum(dim=-1) - mass < p) & (falling >= by_k)
    by_p = falling.gather(1, nucleus.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    by_p = by_p.masked_fill(p >= 1, -torch.inf)
    by_min_p = falling[:, :1] + params.min_p.double().unsqueeze(1).log()
    threshold = torch.maximum(by_k, by_p).maximum(by_min_p)
    kept = x.masked_fill(x < threshold, -torch.inf)
    return torch.where(greedy, torch.zeros_like(x).masked_fill(~best, -torch.inf), kept)


def _race(x: torch.Tensor, params: SamplingTensors, domain: int) -> torch.Tensor:
    """argmax(x - log E) per row, int64 [R]; -inf is out of the race."""
    words = all_words(params.seed, params.sample_index.long(), params.position, x.shape[1], domain)
    return (x + neg_log_exponential(words)).argmax(dim=-1)
