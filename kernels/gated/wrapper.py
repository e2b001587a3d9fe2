"""Gated units on the GPU: same functions and meaning as ``reference``."""

from __future__ import annotations

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.gated.activation import Activation
from kvferry.kernels.gated.kernel import gated_kernel
from kvferry.kernels.kv_layer import FLOAT_TYPES
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require

MAX_BLOCK = 2048
"""Elements of a program: at 16 a thread, four loads of 16 bytes are in flight."""


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. [T, I] each -> [T, I]. Rows may be strided (halves of one product)."""
    return _gated(gate, up, Activation.SILU)


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: bool = True) -> torch.Tensor:
    """gelu(gate) * up, exact or by tanh. [T, I] each -> [T, I]."""
    return _gated(gate, up, Activation.GELU_TANH if approximate else Activation.GELU)


def gated_launch(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, activation: Activation, chip: Chip
) -> Launch:
    """gate, up, out [T, I]. Raises ValueError naming what does not fit."""
    require(gate.dtype in FLOAT_TYPES, "gate", f"no kernel reads {gate.dtype}")
    for name, tensor in (("gate", gate), ("up", up)):
        fits = tensor.dim() == 2 and (tensor.stride(1) == 1 or tensor.shape[1] == 1)
        require(fits, name, "must be [T, I] with contiguous rows")
    like_gate = (up.shape, up.dtype) == (gate.shape, gate.dtype)
    require(like_gate, "up", "shape or dtype differs from gate")
    fits = (out.shape, out.dtype) == (gate.shape, gate.dtype) and out.is_contiguous()
    require(fits, "out", "must be like gate, contiguous")
    num_rows, size = gate.shape
    require(size > 0, "gate", "rows of no elements")
    block = min(MAX_BLOCK, next_power_of_2(size))
    return Launch(
        kernel=gated_kernel,
        grid=(num_rows * -(-size // block),),
        args={
            "p_gate": gate,
            "p_up": up,
            "p_out": out,
            "gate_stride": gate.stride(0),
            "up_stride": up.stride(0),
        },
        constants={"SIZE": size, "ACTIVATION": activation.value, "BLOCK": block},
        num_warps=4,
    )


def _gated(gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gated_launch(gate, up, out, activation, chip_of(gate.device)).run()
    return out
