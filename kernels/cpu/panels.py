"""Weights as the CPU's product reads them: panels of 16 outputs, one after the other.

A matrix [N, K] of which N is a multiple of 16 is stored as [N / 16, K, 16], so that 16 outputs take
one input with one load of consecutive weights. A tensor with three dimensions is such a matrix,
wherever a weight is expected. Parts of it, of whole panels or of some inputs, are views.
"""

from __future__ import annotations

import torch

PANEL = 16
"""As in ``types.h``."""


def can_be_packed(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a weight [N, K] has a form in panels."""
    return dtype is torch.float32 and len(shape) == 2 and shape[0] % PANEL == 0


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy [N / 16, K, 16] of a weight [N, K] that can be packed."""
    outputs, inputs = weight.shape
    return weight.reshape(outputs // PANEL, PANEL, inputs).transpose(1, 2).contiguous()


def unpacked(panels: torch.Tensor) -> torch.Tensor:
    """A copy [N, K] of a weight [N / 16, K, 16]."""
    return panels.transpose(1, 2).reshape(-1, panels.shape[1])


def narrowed(weight: torch.Tensor, dim: int, begin: int, length: int) -> torch.Tensor:
    """Some outputs (dim 0) or inputs (dim 1) of a weight in either form: a view, but for outputs
    that are not whole panels, which are copied out of them.
    """
    if weight.dim() == 3 and dim == 0:
        if begin % PANEL or length % PANEL:
            return unpacked(weight).narrow(0, begin, length)
        return weight.narrow(0, begin // PANEL, length // PANEL)
    return weight.narrow(dim, begin, length)
