"""Launches of verification."""

from __future__ import annotations

import torch

from kvferry.kernels.launch import Launch
from kvferry.kernels.sampling.launches import (
    Split,
    check,
    check_rows,
    floats,
    noise_args,
    partial_results,
    row_args,
    sample_launches,
    split_launch,
    threshold_launches,
)
from kvferry.kernels.sampling.tensors import (
    MAX_DRAFTS,
    DraftTensors,
    SampledTokens,
    SamplingTensors,
    VerifiedTokens,
)
from kvferry.kernels.sampling.verify_kernel import (
    accept_kernel,
    finish_kernel,
    match_kernel,
    replace_kernel,
    target_kernel,
)


def coupled_launches(
    logits: torch.Tensor,
    params: SamplingTensors,
    drafts: DraftTensors,
    out: VerifiedTokens,
    vocab_size: int,
    edited: bool,
) -> list[Launch]:
    """Sample every row, then keep what matches. Raises ValueError naming what does not fit."""
    rows = len(logits)
    _check_drafts(drafts, out, rows, vocab_size)
    sampled = SampledTokens.empty(rows, logits.device)
    args = {
        "p_sampled": sampled.token_ids,
        "p_bad": sampled.invalid,
        "p_draft": drafts.token_ids,
        "p_offsets": drafts.offsets,
        **_outputs(out),
    }
    grid = (len(out.num_accepted),)
    return [
        *sample_launches(logits, params, sampled, vocab_size, edited),
        Launch(kernel=match_kernel, grid=grid, args=args, constants={}, num_warps=1),
    ]


def rejection_launches(
    logits: torch.Tensor,
    params: SamplingTensors,
    drafts: DraftTensors,
    out: VerifiedTokens,
    vocab_size: int,
    edited: bool,
) -> list[Launch]:
    """Thresholds and masses of every row, then one race per sequence, where its drafts end. Raises
    ValueError naming what does not fit.
    """
    check_rows(logits, params, vocab_size)
    rows, sequences, device = len(logits), len(out.num_accepted), logits.device
    _check_drafts(drafts, out, rows, vocab_size)
    split = Split.of(vocab_size)
    threshold = floats(device, rows) if params.filtered else None
    first = [] if threshold is None else threshold_launches(logits, params, threshold, split)
    row = row_args(logits, params, split) | {"p_threshold": threshold}
    target = partial_results(device, rows, split)
    target = {
        "p_top": target["p_top"],
        "p_mass": target["p_score"],
        "p_best_id": target["p_id"],
        "p_bad": target["p_bad"],
    }
    accept, likeliest = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    draft = {"p_draft": drafts.token_ids, "p_probs": drafts.probs}
    kept = {"p_accept": accept, "p_offsets": drafts.offsets}
    best = partial_results(device, sequences, split)
    tops = {"p_row_top": target["p_top"], "p_row_mass": target["p_mass"]}
    finish = {
        "p_temperature": params.temperature,
        **best,
        **kept,
        "p_likeliest": likeliest,
        "p_draft": drafts.token_ids,
        **_outputs(out),
        "num_splits": split.count,
    }
    filtered, padded = {"FILTERED": params.filtered}, {"SPLITS": split.padded}
    probs = {"HAS_PROBS": drafts.probs is not None}
    tile = {"EDITED": edited, "BLOCK": split.block}
    return [
        *first,
        split_launch(target_kernel, rows, split, row | target, filtered | tile),
        Launch(
            kernel=accept_kernel,
            grid=(rows,),
            args=row
            | noise_args(params)
            | target
            | draft
            | {"p_accept": accept, "p_likeliest": likeliest},
            constants=filtered | probs | padded,
            num_warps=1,
        ),
        split_launch(
            replace_kernel,
            sequences,
            split,
            row | noise_args(params) | tops | kept | draft | best,
            filtered | probs | padded | tile,
        ),
        Launch(kernel=finish_kernel, grid=(sequences,), args=finish, constants=padded, num_warps=1),
    ]


def _outputs(out: VerifiedTokens) -> dict[str, torch.Tensor]:
    return {"p_num_kept": out.num_accepted, "p_token": out.token_ids, "p_invalid": out.invalid}


def _check_drafts(drafts: DraftTensors, out: VerifiedTokens, rows: int, vocab_size: int) -> None:
    sequences = len(out.num_accepted)
    check(drafts.offsets, "offsets", torch.int32, sequences + 1)
    check(drafts.token_ids, "token_ids", torch.int64, rows)
    if drafts.probs is not None:
        check(drafts.probs, "probs", torch.float32, rows, vocab_size)
    check(out.num_accepted, "num_accepted", torch.int32, sequences)
    check(out.token_ids, "token_ids", torch.int64, sequences, MAX_DRAFTS + 1)
    check(out.invalid, "invalid", torch.bool, sequences)
