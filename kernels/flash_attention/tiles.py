"""Device code of one step of flash_attention: read a tile of keys and values, and fold it in."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import FLOAT, cache_to, dot, narrow


@triton.jit
def load(p_x, m_x, MASKED: tl.constexpr):
    """What lies at pointers, 0 where masked."""
    if MASKED:
        return tl.load(p_x, mask=m_x, other=0)
    else:
        return tl.load(p_x)


@triton.jit
def load_rows(
    p_k,
    p_v,
    m_key,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Columns [FIRST, FIRST + WIDTH) of keys and values that begin at p_k, p_v [BLOCK_N]."""
    o_d = FIRST + tl.arange(0, WIDTH)
    m_row = m_key[:, None] if MASKED else None
    b_k = load(p_k[:, None] + o_d[None, :], m_row, MASKED)
    b_v = load(p_v[:, None] + o_d[None, :], m_row, MASKED)
    return convert(b_k, KIND, DTYPE), convert(b_v, KIND, DTYPE)


@triton.jit
def convert(b_raw, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of the cache in the type of the queries, before their scale."""
    if KIND == FLOAT:
        return b_raw if b_raw.dtype == DTYPE else narrow(b_raw.to(tl.float32), DTYPE)
    else:
        return cache_to(b_raw, KIND, DTYPE)


@triton.jit
def load_scales(
    p_k_scale,
    p_v_scale,
    b_block,
    o_key,
    m_key,
    i_kv_head,
    kv_heads,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scales of keys and of values, both [BLOCK_N]; for a FLOAT cache nothing that is used."""
    if KIND == FLOAT:
        return o_key, o_key
    else:
        o_scale = (b_block.to(tl.int64) * BLOCK_SIZE + o_key % BLOCK_SIZE) * kv_heads + i_kv_head
        return load(p_k_scale + o_scale, m_key, MASKED), load(p_v_scale + o_scale, m_key, MASKED)


@triton.jit
def fold(
    q,
    kv,
    tail,
    scales,
    m_seen,
    state,
    scale,
    cap,
    TAIL: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of keys and values to the running maximum, sum and product of each row.

    Scales of a quantised cache multiply the columns of the scores, as k's do, and of the weights,
    as v's do: BLOCK_M * BLOCK_N products instead of BLOCK_N * D with a rounding each.
    """
    b_acc, b_acc_tail, b_max, b_sum = state
    b_k_scale, b_v_scale = scales
    b_s = dot(q[0], tl.trans(kv[0]), tl.zeros([b_max.shape[0], kv[0].shape[0]], tl.float32))
    if TAIL:
        b_s = dot(q[1], tl.trans(tail[0]), b_s)
    if KIND != FLOAT:
        b_raw, b_scale = b_s, (b_k_scale * scale)[None, :]
        b_s = b_s * b_scale
    elif CAPPED:
        b_s = b_s * scale
    if CAPPED:
        b_s = cap - 2.0 * cap / (tl.exp2(b_s) + 1.0)
    if MASKED:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    if KIND != FLOAT or CAPPED:
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max) if MASKED else b_new_max
        if CAPPED:
            b_s = b_s - b_shift[:, None]
        else:
            # Left alone, the compiler fuses product and difference where no mask is between them,
            # and a row's bits depend on which of its tiles have masks.
            b_s = tl.fma(b_raw, b_scale, -b_shift[:, None])
            if MASKED:
                b_s = tl.where(m_seen, b_s, float("-inf"))
        b_p = tl.exp2(b_s)
    else:
        # One multiply-add per score: the scale is positive, so it may follow the maximum.
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * scale)
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max) if MASKED else b_new_max
        b_p = tl.exp2(b_s * scale - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_decay + tl.sum(b_p, 1)
    if KIND != FLOAT:
        b_p = b_p * b_v_scale[None, :]
    b_p = narrow(b_p, q[0].dtype)
    b_acc = dot(b_p, kv[1], b_acc * b_decay[:, None])
    if TAIL:
        b_acc_tail = dot(b_p, tail[1], b_acc_tail * b_decay[:, None])
    return b_acc, b_acc_tail, b_new_max, b_sum
