"""RMSNorm on the GPU: same functions and meaning as ``reference``, for contiguous rows."""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require
from kvferry.kernels.rms_norm.kernel import rms_norm_kernel

MAX_SIZE = 65536
"""A row stays in the registers of one program."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x [..., C], weight [C] -> [..., C]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, x.shape[-1])
    rms_norm_launch(rows, None, weight, eps, out_rows, None, chip_of(x.device)).run()
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, which is the next residual. Both [T, C]."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    rms_norm_launch(x, residual, weight, eps, out, total, chip_of(x.device)).run()
    return out, total


def rms_norm_launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    total: torch.Tensor | None,
    chip: Chip,
) -> Launch:
    """x, residual, out, total [T, C]; weight [C]. Raises ValueError naming what does not fit."""
    size = x.shape[-1]
    require(x.dim() == 2 and x.stride(1) == 1, "x", "must be [T, C] with contiguous rows")
    require(0 < size <= MAX_SIZE, "x", f"rows of {size} elements; 1 to {MAX_SIZE} are possible")
    require(weight.shape == (size,) and weight.is_contiguous(), "weight", f"must be [{size}]")
    require(out.shape == x.shape and out.is_contiguous(), "out", "must be like x, contiguous")
    for name, tensor in (("residual", residual), ("total", total)):
        fits = tensor is None or (tensor.shape == x.shape and tensor.is_contiguous())
        require(fits, name, "must be like x, contiguous")
    require((residual is None) == (total is None), "total", "goes with residual")
    block = next_power_of_2(size)
    return Launch(
        kernel=rms_norm_kernel,
        grid=(x.shape[0],),
        args={
            "p_x": x,
            "p_residual": residual,
            "p_weight": weight,
            "p_out": out,
            "p_total": total,
            "x_stride": x.stride(0),
            "size": size,
            "eps": eps,
        },
        constants={"ADD": residual is not None, "BLOCK": block},
        num_warps=min(16, max(1, block // 512)),
    )
