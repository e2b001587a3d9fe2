"""The batch-invariant product on the GPU: same function and meaning as ``reference``.

bfloat16 and float16 are summed in float32 on the matrix units; float32 is multiplied in float32. A
row of the result has the same bits alone, in any batch and at any place in it (He et al.,
"Defeating nondeterminism in LLM inference", Thinking Machines Lab, 2025): ``configs`` says why.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch, chip_of, require
from kvferry.kernels.matmul.configs import Family, Rows, family_of
from kvferry.kernels.matmul.kernel import matmul_kernel

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] in the type of ``x``."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    matmul_launch(x, weight, bias, out, chip_of(x.device)).run()
    return out


def matmul_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    chip: Chip,
    family: Family | None = None,
) -> Launch:
    """x [M, K], weight [N, K], bias [N], out [M, N]; ``family``: other tiles than the chip's.

    Rows of x and weight are contiguous, at any stride. Raises ValueError naming what does not fit.
    """
    _check(x, weight, bias, out)
    (m, k), n = x.shape, weight.shape[0]
    family = family or family_of(x.dtype, chip)
    rows = family.pick(m, n, chip.num_sms)
    tma = chip.arch >= 90 and m > 0 and all(map(_has_descriptor, (x, weight, out)))
    # The ordinary units have no use for the large tiles in shared memory that descriptors bring.
    tma = tma and x.dtype is not torch.float32
    num_tiles = -(-m // rows.block_m) * -(-n // family.block_n)
    # Descriptors make a tile's address cheap, so that one program per multiprocessor can prefetch
    # its next tile's operands while it stores; pointers do better with a program per tile.
    return Launch(
        kernel=matmul_kernel,
        grid=(min(num_tiles, chip.num_sms) if tma else num_tiles,),
        args={
            **(_descriptors(x, weight, out, family, rows) if tma else _pointers(x, weight, out)),
            "p_bias": bias,
            "M": m,
            "N": n,
            "K": k,
            "x_stride": x.stride(0),
            "weight_stride": weight.stride(0),
        },
        constants={
            "TMA": tma,
            "BLOCK_M": rows.block_m,
            "BLOCK_N": family.block_n,
            "BLOCK_K": family.block_k,
            "GROUP_M": family.group_m,
        },
        num_warps=rows.num_warps,
        num_stages=rows.num_stages,
    )


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    require(x.dtype in TYPES, "x", f"no kernel multiplies {x.dtype}")
    require(x.dim() == 2 and x.stride(1) == 1, "x", "must be [M, K] with contiguous rows")
    fits = weight.dim() == 2 and weight.shape[1] == x.shape[1] and weight.stride(1) == 1
    require(fits, "weight", f"must be [N, {x.shape[1]}] with contiguous rows")
    require(min(weight.shape) > 0, "weight", f"is empty: {tuple(weight.shape)}")
    require(weight.dtype is x.dtype, "weight", f"is {weight.dtype}, x is {x.dtype}")
    n = weight.shape[0]
    require(bias is None or (bias.shape == (n,) and bias.is_contiguous()), "bias", f"must be [{n}]")
    fits = out.shape == (x.shape[0], n) and out.is_contiguous() and out.dtype is x.dtype
    require(fits, "out", f"must be {x.dtype} [{x.shape[0]}, {n}], contiguous")


def _has_descriptor(tensor: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator reads it: base and rows at multiples of 16 bytes."""
    on_16 = tensor.storage_offset() * tensor.itemsize % 16 == 0
    return on_16 and tensor.stride(0) * tensor.itemsize % 16 == 0


def _pointers(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
    return {"p_x": x, "p_weight": weight, "p_out": out}


def _descriptors(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, family: Family, rows: Rows
) -> dict[str, Any]:
    def describe(tensor: torch.Tensor, height: int, width: int) -> Any:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [height, width])

    return {
        "p_x": describe(x, rows.block_m, family.block_k),
        "p_weight": describe(weight, family.block_n, family.block_k),
        # A tile leaves in two halves.
        "p_out": describe(out, rows.block_m, family.block_n // 2),
    }
