"""RMSNorm in plain torch (Zhang, Sennrich, "Root mean square layer normalization", 2019).

Shapes: T tokens, C hidden size. The mean is taken in float32 whatever the type of ``x``.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x [..., C], weight [C] -> [..., C].

    The normed value is rounded to the type of ``x`` before the weight, as Llama has it.
    ``unit_offset``: the factor is 1 + weight, and is applied before the rounding, as Gemma has it.
    """
    x32 = x.to(torch.float32)
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, which is the next residual. Both [T, C]."""
    total = residual + x
    return rms_norm(total, weight, eps, unit_offset), total
