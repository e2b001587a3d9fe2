"""How kernels of sampling read a row."""

from __future__ import annotations

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))
POS_INF = tl.constexpr(float("inf"))
NO_ID = tl.constexpr(2**31 - 1)
MIN_TEMPERATURE = tl.constexpr(1e-20)


@triton.jit
def load_split(p_logits, i_row, i_split, stride, vocab_size, BLOCK: tl.constexpr):
    """Ids of a split and their logits in float32; -inf for what is not finite or no id."""
    o_v = i_split * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_l = tl.load(p_logits + i_row * stride + o_v, mask=m_v, other=NEG_INF).to(tl.float32)
    return o_v, tl.where((b_l > NEG_INF) & (b_l < POS_INF), b_l, NEG_INF)


@triton.jit
def load_temperature(p_temperature, i_row):
    """The temperature, and whether the row is greedy; 1 if it is."""
    temperature = tl.load(p_temperature + i_row)
    is_greedy = temperature <= 0.0
    return tl.where(is_greedy, 1.0, tl.maximum(temperature, MIN_TEMPERATURE)), is_greedy


@triton.jit
def mass_of(b_l, top, temperature):
    """exp((l - top) / temperature), 0 for -inf also where the top is -inf."""
    return tl.exp((b_l - tl.where(top > NEG_INF, top, 0.0)) / temperature)
