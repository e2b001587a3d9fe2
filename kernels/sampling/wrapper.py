"""Sampling on the GPU: same functions and meaning as ``reference``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvferry.kernels.launch import Launch
from kvferry.kernels.sampling.edit_launches import (
    add_tokens_launch,
    edit_launches,
    top_logprobs_launches,
)
from kvferry.kernels.sampling.launches import sample_launches
from kvferry.kernels.sampling.tensors import (
    DraftTensors,
    EditTensors,
    SampledTokens,
    SamplingTensors,
    TopLogprobs,
    VerifiedTokens,
)
from kvferry.kernels.sampling.verify_launches import coupled_launches, rejection_launches


def add_tokens(
    counts: torch.Tensor, slots: torch.Tensor, token_ids: torch.Tensor, is_prompt: bool
) -> None:
    """Count tokens [N] of slots [N] in ``counts`` [num_slots, V] in place, as part of the prompt or
    of the output. Negative slots and ids outside the vocabulary are ignored.
    """
    add_tokens_launch(counts, slots, token_ids, is_prompt).run()


def apply_edits(logits: torch.Tensor, edits: EditTensors, vocab_size: int) -> torch.Tensor:
    """Penalties, bias, bans and grammar, in this order: ``logits`` [R, >= V] -> float32 [R, V].

    What is forbidden becomes -inf. What is not finite becomes NaN, so that it is still seen.
    """
    out = torch.empty(len(logits), vocab_size, dtype=torch.float32, device=logits.device)
    _run(edit_launches(logits, edits, out, vocab_size))
    return out


def sample(
    logits: torch.Tensor, params: SamplingTensors, vocab_size: int, edited: bool = False
) -> SampledTokens:
    """Draw one token per row of ``logits`` [R, >= V]; the lowest id among equals.

    ``edited``: they come from ``apply_edits``, so that -inf is no mistake.
    """
    out = SampledTokens.empty(len(logits), logits.device)
    _run(sample_launches(logits, params, out, vocab_size, edited))
    return out


def top_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, count: int, vocab_size: int
) -> TopLogprobs:
    """Log-softmax of raw ``logits`` [R, >= V] in ``rows`` int32 [M]: of the M ``token_ids`` int64,
    and of the ``count`` likeliest ids.
    """
    out = TopLogprobs.empty(len(rows), count, logits.device)
    _run(top_logprobs_launches(logits, rows, token_ids, out, vocab_size))
    return out


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
    out = _verified(drafts)
    _run(coupled_launches(logits, params, drafts, out, vocab_size, edited))
    return out


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
    out = _verified(drafts)
    _run(rejection_launches(logits, params, drafts, out, vocab_size, edited))
    return out


def _verified(drafts: DraftTensors) -> VerifiedTokens:
    return VerifiedTokens.empty(len(drafts.offsets) - 1, drafts.offsets.device)


def _run(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.run()
