"""RMSNorm on the GPU: same functions and meaning as ``reference``.

No row depends on its neighbours, bit for bit: one program reduces a row in an order that the row's
size alone decides.
"""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.kv_layer import FLOAT_TYPES
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require
from kvferry.kernels.rms_norm.kernel import rms_norm_kernel, rms_norm_long_kernel

MAX_SIZE = 65536
MAX_ROW_NBYTES = 32768
"""Longest row (its power of two) in the registers of one program: 64 bytes a thread."""
LONG_BLOCK = 8192
"""What a program takes of a longer row at a time."""
TILE = 2048
"""Elements of a program that takes several short rows."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x [..., C], weight [C] -> [..., C]; see ``reference``."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    chip = chip_of(x.device)
    rms_norm_launch(rows, None, weight, eps, out_rows, None, chip, unit_offset).run()
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, which is the next residual. Both [T, C]."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    chip = chip_of(x.device)
    rms_norm_launch(x, residual, weight, eps, out, total, chip, unit_offset).run()
    return out, total


def rms_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    chip: Chip,
    unit_offset: bool = False,
) -> Launch:
    """x, residual, out, total [T, C]; weight [C]. Raises ValueError naming what does not fit."""
    _check(x, residual, weight, out, total)
    num_rows, size = x.shape
    args = {
        "p_x": x,
        "p_residual": residual,
        "p_weight": weight,
        "p_out": out,
        "p_total": total,
        "x_stride": x.stride(0),
        "eps": eps,
    }
    constants = {"SIZE": size, "ADD": residual is not None, "UNIT_OFFSET": unit_offset}
    block = next_power_of_2(size)
    if block * x.itemsize > MAX_ROW_NBYTES:
        return Launch(
            kernel=rms_norm_long_kernel,
            grid=(num_rows,),
            args=args,
            constants=constants | {"BLOCK": LONG_BLOCK},
            num_warps=16,
        )
    rows = max(1, TILE // block)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(-(-num_rows // rows),),
        args=args | {"num_rows": num_rows},
        constants=constants | {"ROWS": rows, "BLOCK": block},
        num_warps=min(16, max(4, block // 512)),
    )


def _check(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    size = x.shape[-1]
    require(x.dtype in FLOAT_TYPES, "x", f"no kernel reads {x.dtype}")
    require(x.dim() == 2 and x.stride(1) == 1, "x", "must be [T, C] with contiguous rows")
    require(0 < size <= MAX_SIZE, "x", f"rows of {size} elements; 1 to {MAX_SIZE} are possible")
    fits = weight.shape == (size,) and weight.is_contiguous() and weight.dtype == x.dtype
    require(fits, "weight", f"must be {x.dtype} [{size}], contiguous")
    for name, tensor in (("residual", residual), ("out", out), ("total", total)):
        fits = tensor is None or (
            tensor.shape == x.shape and tensor.is_contiguous() and tensor.dtype == x.dtype
        )
        require(fits, name, "must be like x, contiguous")
    require((residual is None) == (total is None), "total", "goes with residual")
