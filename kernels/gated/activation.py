"""The activations of gated units."""

from __future__ import annotations

from enum import IntEnum


class Activation(IntEnum):
    """A constant of the kernel."""

    SILU = 0
    GELU = 1
    GELU_TANH = 2
