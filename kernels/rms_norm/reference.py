"""RMSNorm in plain torch (Zhang, Sennrich, "Root mean square layer normalization", 2019).

Shapes: T tokens, C hidden size. The mean is taken in float32 whatever the type of ``x``.
"""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps). x [..., C], weight [C] -> [..., C]."""
    x32 = x.to(torch.float32)
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, which is the next residual. Both [T, C]."""
    total = residual + x
    return rms_norm(total, weight, eps), total
