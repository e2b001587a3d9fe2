"""Gated units: activation and product in one pass over both halves."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.gated.activation import Activation
from kvferry.kernels.language import narrow

_SILU = tl.constexpr(Activation.SILU.value)
_GELU = tl.constexpr(Activation.GELU.value)


@triton.jit
def _sigmoid(b_x):
    """1 / (1 + exp(-x)), without an overflow on either side."""
    b_exp = tl.exp(-tl.abs(b_x))
    return tl.where(b_x < 0, b_exp, 1.0) / (1.0 + b_exp)


@triton.jit
def _activated(b_x, ACTIVATION: tl.constexpr):
    """float32 -> float32."""
    if ACTIVATION == _SILU:
        return b_x * _sigmoid(b_x)
    elif ACTIVATION == _GELU:
        return 0.5 * b_x * (1.0 + tl.erf(b_x * 0.7071067811865476))
    else:
        # 1 + tanh(z) = 2 sigmoid(2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
        return b_x * _sigmoid(1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x))


@triton.jit
def gated_kernel(
    p_gate,
    p_up,
    p_out,
    gate_stride,
    up_stride,
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = activation(gate) * up, BLOCK elements of one row per program."""
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_row = (tl.program_id(0) // TILES).to(tl.int64)
    o_c = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < SIZE
    b_gate = tl.load(p_gate + i_row * gate_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + i_row * up_stride + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_activated = narrow(_activated(b_gate, ACTIVATION), p_gate.dtype.element_ty).to(tl.float32)
    b_out = narrow(b_activated * b_up, p_out.dtype.element_ty)
    tl.store(p_out + i_row * SIZE + o_c, b_out, mask=m_c)
