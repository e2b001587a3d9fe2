"""Products with weights of 4 and 8 bits on the GPU: same function and meaning as ``reference``.

Each weight is read once and turned into bf16 or fp16 in registers, by exact integer values; scales
are applied in float32 to the sums over their groups (bit tricks after Frantar et al., "MARLIN:
mixed-precision auto-regressive parallel inference on large language models", 2024).
"""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch, chip_of, require
from kvferry.kernels.quant_matmul.configs import ANY, Split, Tile, split_for, tile_for
from kvferry.kernels.quant_matmul.kernel import quant_matmul_kernel, sum_splits_kernel
from kvferry.kernels.quant_matmul.layout import UNIT, QuantWeight

TYPES = (torch.bfloat16, torch.float16)
SUM_BLOCK = 256


def quant_matmul(
    x: torch.Tensor,
    weight: QuantWeight,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x [M, K] times the weight's values [N, K] transposed, plus bias [N] -> [M, N].

    ``batch_invariant``: a row of the result has the same bits in every batch. Without it that holds
    between batches of one bucket of M (``configs``).
    """
    out = x.new_empty(x.shape[0], weight.num_outputs)
    for launch in quant_matmul_launches(
        x, weight, bias, out, chip_of(x.device), batch_invariant=batch_invariant
    ):
        launch.run()
    return out


def quant_matmul_launches(
    x: torch.Tensor,
    weight: QuantWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    chip: Chip,
    *,
    batch_invariant: bool = False,
    tile: Tile | None = None,
) -> list[Launch]:
    """x [M, K], bias [N], out [M, N]; ``tile``: another one than the chip's.

    One launch, or two when K is split. Raises ValueError naming what does not fit.
    """
    _check(x, weight, bias, out)
    m, n = out.shape
    tile = tile or tile_for(m, chip, batch_invariant)
    split = split_for(tile, n, weight.num_inputs, chip)
    num_programs = -(-m // tile.block_m) * -(-n // tile.block_n)
    if split.num_splits == 1 or (tile.max_m == ANY and num_programs >= chip.num_sms):
        # A large batch has programs enough: each sums all splits, in the same order.
        return [_product(x, weight, bias, out, tile, split)]
    parts = x.new_empty(split.num_splits, m, n, dtype=torch.float32)
    return [_product(x, weight, None, parts, tile, split), _sum_of(parts, bias, out)]


def _product(
    x: torch.Tensor,
    weight: QuantWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: Tile,
    split: Split,
) -> Launch:
    m, n = x.shape[0], weight.num_outputs
    into_parts = out.dim() == 3
    num_splits = split.num_splits if into_parts else 1
    return Launch(
        kernel=quant_matmul_kernel,
        grid=(-(-m // tile.block_m), -(-n // tile.block_n), num_splits),
        args={
            "p_x": x,
            "p_packed": weight.packed,
            "p_scales": weight.scales,
            "p_zeros": weight.zeros,
            "p_bias": bias,
            "p_out": out,
            "M": m,
            "N": n,
            "K": weight.num_inputs,
            "x_stride": x.stride(0),
            "units_per_split": split.units_per_split,
            "num_splits": split.num_splits,
        },
        constants={
            "BITS": weight.bits,
            "GROUP": weight.group_size,
            "SPLIT": into_parts,
            "FOLD": split.num_splits > num_splits,
            "EVEN_K": weight.num_inputs % UNIT == 0,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _sum_of(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    size = out.numel()
    return Launch(
        kernel=sum_splits_kernel,
        grid=(-(-size // SUM_BLOCK),),
        args={
            "p_parts": parts,
            "p_bias": bias,
            "p_out": out,
            "M": out.shape[0],
            "N": out.shape[1],
        },
        constants={"SPLITS": parts.shape[0], "BLOCK": SUM_BLOCK},
        num_warps=2,
    )


def _check(
    x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    weight.check()
    n, k = weight.num_outputs, weight.num_inputs
    require(x.dtype in TYPES, "x", f"no kernel multiplies {x.dtype} with codes")
    fits = x.dim() == 2 and x.shape[1] == k and x.stride(1) == 1
    require(fits, "x", f"must be [M, {k}] with contiguous rows")
    require(bias is None or (bias.shape == (n,) and bias.is_contiguous()), "bias", f"must be [{n}]")
    fits = out.shape == (x.shape[0], n) and out.is_contiguous() and out.dtype is x.dtype
    require(fits, "out", f"must be {x.dtype} [{x.shape[0]}, {n}], contiguous")
