"""Tiles, scratch memory and launches of sampling; what a wrapper checks of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.kernels.launch import Launch, next_power_of_2, require
from kvferry.kernels.sampling.kernel import merge_kernel, race_kernel
from kvferry.kernels.sampling.tensors import SampledTokens, SamplingTensors
from kvferry.kernels.sampling.threshold_kernel import (
    NUM_PIVOTS,
    ROW_FACTS,
    bracket_kernel,
    gather_kernel,
    scan_kernel,
    search_kernel,
)

MIN_BLOCK = 256
MAX_SPLITS = 64
SEARCH_TILE = 4096
LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a row is split: a function of the vocabulary alone, so that results are, too."""

    vocab_size: int
    block: int
    """Ids per program."""
    count: int
    """Programs per row."""

    @classmethod
    def of(cls, vocab_size: int) -> Split:
        block = max(MIN_BLOCK, next_power_of_2(-(-vocab_size // MAX_SPLITS)))
        return cls(vocab_size=vocab_size, block=block, count=-(-vocab_size // block))

    @property
    def padded(self) -> int:
        return next_power_of_2(self.count)

    @property
    def num_warps(self) -> int:
        return min(8, max(1, self.block // 512))


def threshold_launches(
    logits: torch.Tensor, params: SamplingTensors, threshold: torch.Tensor, split: Split
) -> list[Launch]:
    """Fill ``threshold`` float32 [R]."""
    rows, device = len(logits), logits.device
    top, mass = (floats(device, rows, split.count) for _ in range(2))
    pivot = floats(device, rows, NUM_PIVOTS.value)
    above = floats(device, rows, split.count, 2, NUM_PIVOTS.value)
    found = floats(device, rows, split.count, split.block)
    num_found = torch.empty(rows, split.count, dtype=torch.int32, device=device)
    facts = floats(device, rows, ROW_FACTS.value)
    row = row_args(logits, params, split)
    tops = {"p_top": top, "p_mass": mass}
    pivots = {"p_pivot": pivot, "p_above": above}
    limits = {"p_top_k": params.top_k, "p_top_p": params.top_p}
    in_bracket = {"p_found": found, "p_num_found": num_found, "p_facts": facts}
    block, splits = {"BLOCK": split.block}, {"SPLITS": split.padded, "BLOCK": split.block}
    search = {
        "p_temperature": params.temperature,
        **limits,
        "p_min_p": params.min_p,
        **in_bracket,
        "p_threshold": threshold,
        "num_splits": split.count,
    }
    width = {"WIDTH": min(split.block, SEARCH_TILE // split.padded)}
    return [
        split_launch(scan_kernel, rows, split, row | tops, block),
        split_launch(bracket_kernel, rows, split, row | tops | pivots, splits),
        split_launch(gather_kernel, rows, split, row | limits | tops | pivots | in_bracket, splits),
        Launch(
            kernel=search_kernel,
            grid=(rows,),
            args=search,
            constants=splits | width,
            num_warps=8,
        ),
    ]


def sample_launches(
    logits: torch.Tensor,
    params: SamplingTensors,
    out: SampledTokens,
    vocab_size: int,
    edited: bool,
) -> list[Launch]:
    """One token per row. Raises ValueError naming what does not fit."""
    check_rows(logits, params, vocab_size)
    rows, device = len(logits), logits.device
    check(out.token_ids, "token_ids", torch.int64, rows)
    check(out.invalid, "invalid", torch.bool, rows)
    split = Split.of(vocab_size)
    launches, threshold = [], None
    if params.filtered:
        threshold = floats(device, rows)
        launches = threshold_launches(logits, params, threshold, split)
    best = partial_results(device, rows, split)
    race = row_args(logits, params, split) | noise_args(params) | best
    constants = {"FILTERED": params.filtered, "EDITED": edited, "BLOCK": split.block}
    merge = {
        "p_temperature": params.temperature,
        **best,
        "p_token": out.token_ids,
        "p_invalid": out.invalid,
        "num_splits": split.count,
    }
    return [
        *launches,
        split_launch(race_kernel, rows, split, race | {"p_threshold": threshold}, constants),
        Launch(
            kernel=merge_kernel,
            grid=(rows,),
            args=merge,
            constants={"SPLITS": split.padded},
            num_warps=1,
        ),
    ]


def split_launch(
    kernel: Any, rows: int, split: Split, args: dict[str, Any], constants: dict[str, Any]
) -> Launch:
    """A program per row and split."""
    return Launch(
        kernel=kernel,
        grid=(rows, split.count),
        args=args,
        constants=constants,
        num_warps=split.num_warps,
    )


def partial_results(device: torch.device, rows: int, split: Split) -> dict[str, torch.Tensor]:
    """What a race leaves per split."""
    ids, bad = (torch.empty(rows, split.count, dtype=torch.int32, device=device) for _ in range(2))
    score, top = (floats(device, rows, split.count) for _ in range(2))
    return {"p_score": score, "p_id": ids, "p_top": top, "p_bad": bad}


def noise_args(params: SamplingTensors) -> dict[str, torch.Tensor]:
    """What keys the noise of a row."""
    return {
        "p_seed": params.seed,
        "p_sample_index": params.sample_index,
        "p_position": params.position,
    }


def check_rows(logits: torch.Tensor, params: SamplingTensors, vocab_size: int) -> None:
    """Raise ValueError naming what does not fit."""
    check_logits(logits, vocab_size)
    rows = len(logits)
    check(params.temperature, "temperature", torch.float32, rows)
    check(params.top_k, "top_k", torch.int32, rows)
    check(params.top_p, "top_p", torch.float32, rows)
    check(params.min_p, "min_p", torch.float32, rows)
    check(params.seed, "seed", torch.int64, rows)
    check(params.sample_index, "sample_index", torch.int32, rows)
    check(params.position, "position", torch.int64, rows)


def check_logits(logits: torch.Tensor, vocab_size: int) -> None:
    """Raise ValueError unless they are [R, >= V] rows of a type that is supported."""
    require(
        logits.dim() == 2 and logits.stride(1) == 1, "logits", "must be [R, V], rows contiguous"
    )
    require(logits.dtype in LOGIT_TYPES, "logits", f"cannot be {logits.dtype}")
    require(0 < vocab_size <= logits.shape[1], "vocab_size", f"must be 1 to {logits.shape[1]}")


def check(tensor: torch.Tensor, name: str, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless the tensor has this type and shape and is contiguous."""
    fits = tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    require(fits, name, f"must be {dtype} {list(shape)}, contiguous")


def row_args(logits: torch.Tensor, params: SamplingTensors, split: Split) -> dict[str, Any]:
    return {
        "p_logits": logits,
        "p_temperature": params.temperature,
        "stride": logits.stride(0),
        "vocab_size": split.vocab_size,
        "num_splits": split.count,
    }


def floats(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)
