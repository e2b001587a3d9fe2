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
def load_checked(
    p_logits, i_row, i_split, stride, vocab_size, EDITED: tl.constexpr, BLOCK: tl.constexpr
):
    """Like ``load_split``, and whether any logit was not finite (EDITED: -inf is allowed)."""
    o_v = i_split * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_l = tl.load(p_logits + i_row * stride + o_v, mask=m_v, other=0.0).to(tl.float32)
    m_good = (b_l > NEG_INF) & (b_l < POS_INF)
    m_bad = m_good == 0
    if EDITED:
        m_bad = m_bad & (b_l != NEG_INF)
    return o_v, tl.where(m_v & m_good, b_l, NEG_INF), tl.max(m_bad.to(tl.int32), axis=0)


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


@triton.jit
def row_top(p_top, p_mass, i_row, num_splits, temperature, SPLITS: tl.constexpr):
    """Largest logit and mass of a whole row, from those of its splits."""
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < num_splits
    b_top = tl.load(p_top + i_row * num_splits + o_s, mask=m_s, other=NEG_INF)
    b_mass = tl.load(p_mass + i_row * num_splits + o_s, mask=m_s, other=0.0)
    top = tl.max(b_top, axis=0)
    return top, tl.sum(b_mass * mass_of(b_top, top, temperature), axis=0)


@triton.jit
def best_of_splits(
    p_score, p_id, p_top, p_bad, i_row, num_splits, temperature, is_greedy, SPLITS: tl.constexpr
):
    """The id with the best score of a whole row, 0 if none is left; whether the row is bad; the
    score.
    """
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < num_splits
    p_at = i_row * num_splits + o_s
    b_score = tl.load(p_score + p_at, mask=m_s, other=NEG_INF)
    b_id = tl.load(p_id + p_at, mask=m_s, other=NO_ID)
    b_top = tl.load(p_top + p_at, mask=m_s, other=NEG_INF)
    bad = tl.max(tl.load(p_bad + p_at, mask=m_s, other=0), axis=0) > 0
    top = tl.max(b_top, axis=0)
    b_shift = (b_top - tl.where(top > NEG_INF, top, 0.0)) / temperature
    b_total = b_score + tl.where(is_greedy | (top == NEG_INF), 0.0, b_shift)
    best = tl.max(b_total, axis=0)
    token = tl.min(tl.where(b_total == best, b_id, NO_ID), axis=0)
    return tl.where((best > NEG_INF) & (bad == 0), token, 0), bad, best
