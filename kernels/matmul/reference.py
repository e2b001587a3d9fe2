"""y = x W^T + b in plain torch.

Shapes: M rows of x, N output features, K input features; weight as in ``nn.Linear``. Products are
summed in float64, so that the result is right to one rounding whatever the type. Batch invariance
is not promised here: a library picks its algorithm by M.
"""

from __future__ import annotations

import torch


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] in the type of ``x``."""
    total = x.to(torch.float64) @ weight.to(torch.float64).T
    if bias is not None:
        total = total + bias.to(torch.float64)
    return total.to(x.dtype)
