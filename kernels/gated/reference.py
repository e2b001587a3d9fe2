"""Gated units in plain torch (Shazeer, "GLU variants improve Transformer", arXiv:2002.05202).

Shapes: T tokens, I intermediate size. The activation is rounded to the type of ``gate`` before the
product, as in the models that were trained with these units.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)). [T, I] each -> [T, I]."""
    return silu(gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: bool = True) -> torch.Tensor:
    """gelu(gate) * up, gelu(x) = x * Phi(x) (Hendrycks, Gimpel, arXiv:1606.08415), or with its
    approximation by tanh. [T, I] each -> [T, I].
    """
    return gelu(gate, approximate="tanh" if approximate else "none") * up
