"""Embedding on the GPU: same function and meaning as ``reference``."""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.embedding.kernel import embedding_kernel
from kvferry.kernels.kv_layer import FLOAT_TYPES
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require

MAX_BLOCK = 2048
"""Elements of a program. A table row of 4096 is two programs, so that 64 tokens fill a chip."""


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, shard_start: int = 0) -> torch.Tensor:
    """Rows of the ids in [shard_start, shard_start + V), zeros for all others. token_ids int64 [T],
    weight [V, C] -> [T, C]. Nothing is read for an id outside, whatever it is.
    """
    out = weight.new_empty((*token_ids.shape, weight.shape[-1]))
    embedding_launch(token_ids, weight, shard_start, out, chip_of(weight.device)).run()
    return out


def embedding_launch(
    token_ids: torch.Tensor, weight: torch.Tensor, shard_start: int, out: torch.Tensor, chip: Chip
) -> Launch:
    """token_ids [T], weight [V, C], out [T, C]. Raises ValueError naming what does not fit."""
    fits = token_ids.dim() == 1 and token_ids.is_contiguous()
    require(fits and token_ids.dtype is torch.int64, "token_ids", "must be int64 [T], contiguous")
    require(weight.dtype in FLOAT_TYPES, "weight", f"no kernel reads {weight.dtype}")
    require(
        weight.dim() == 2 and weight.stride(1) == 1, "weight", "must be [V, C], rows contiguous"
    )
    require(weight.numel() > 0, "weight", "a table of no elements")
    require(shard_start >= 0, "shard_start", f"{shard_start} is negative")
    num_tokens, size = token_ids.shape[0], weight.shape[1]
    fits = out.shape == (num_tokens, size) and out.is_contiguous() and out.dtype == weight.dtype
    require(fits, "out", f"must be {weight.dtype} [{num_tokens}, {size}], contiguous")
    block = min(MAX_BLOCK, next_power_of_2(size))
    return Launch(
        kernel=embedding_kernel,
        grid=(num_tokens * -(-size // block),),
        args={
            "p_ids": token_ids,
            "p_weight": weight,
            "p_out": out,
            "weight_stride": weight.stride(0),
            "num_rows": weight.shape[0],
            "shard_start": shard_start,
        },
        constants={"SIZE": size, "BLOCK": block},
        num_warps=4,
    )
