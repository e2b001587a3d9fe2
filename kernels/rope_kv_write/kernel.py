"""QK norm, rotation and the write of keys and values into the paged cache, in one launch.

A row is one head of one token. Programs take ROWS query rows each, or behind those ROWS rows of
keys and of values. A row lies in two tiles of D / 2 elements, element i of one paired with element
i of the other: the rotation needs no exchange between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import FLOAT, cache_from, narrow, quantisation_scale


@triton.jit
def _pairs(D: tl.constexpr, ROTARY: tl.constexpr, PAIRS: tl.constexpr):
    """Offsets in a row of both elements of each pair. What is not rotated is paired too."""
    o_p = tl.arange(0, PAIRS)
    if ROTARY == D:
        return o_p, o_p + D // 2
    else:
        m_turned = o_p < ROTARY // 2
        o_rest = o_p + ROTARY // 2
        return (
            tl.where(m_turned, o_p, o_rest),
            tl.where(m_turned, o_rest, o_rest + (D - ROTARY) // 2),
        )


@triton.jit
def _normed(b_low, b_high, p_weight, o_low, o_high, m_p, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm of rows, rounded as in kernels/rms_norm. float32 [ROWS, PAIRS] twice."""
    b_mean_square = tl.sum(b_low * b_low + b_high * b_high, axis=1) / D
    b_scale = tl.rsqrt(b_mean_square + eps)[:, None]
    b_low_weight = tl.load(p_weight + o_low, mask=m_p, other=0.0).to(tl.float32)[None, :]
    b_high_weight = tl.load(p_weight + o_high, mask=m_p, other=0.0).to(tl.float32)[None, :]
    b_low = narrow(b_low * b_scale, DTYPE).to(tl.float32) * b_low_weight
    b_high = narrow(b_high * b_scale, DTYPE).to(tl.float32) * b_high_weight
    return narrow(b_low, DTYPE).to(tl.float32), narrow(b_high, DTYPE).to(tl.float32)


@triton.jit
def _rotated(b_low, b_high, p_cos, p_sin, o_angle, m_angle, DTYPE: tl.constexpr):
    """float32 -> DTYPE. Elements that are not rotated have angle 0."""
    b_cos = tl.load(p_cos + o_angle, mask=m_angle, other=1.0).to(tl.float32)
    b_sin = tl.load(p_sin + o_angle, mask=m_angle, other=0.0).to(tl.float32)
    return (
        narrow(b_low * b_cos - b_high * b_sin, DTYPE),
        narrow(b_high * b_cos + b_low * b_sin, DTYPE),
    )


@triton.jit
def _write(
    b_low, b_high, p_cache, p_scale, o_row, o_scale, o_low, o_high, m_row, m, KIND: tl.constexpr
):
    """Rows into the cache, as its KIND keeps them."""
    b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
    if KIND != FLOAT:
        # As integers, magnitudes have the order of floats, and NaN is the largest.
        b_both = tl.maximum(
            tl.abs(b_low).to(tl.int32, bitcast=True), tl.abs(b_high).to(tl.int32, bitcast=True)
        )
        b_largest = tl.max(b_both, axis=1).to(tl.float32, bitcast=True)
        b_scale, b_inverse = quantisation_scale(b_largest, KIND)
        tl.store(p_scale + o_scale, b_scale, mask=m_row)
        b_low, b_high = b_low * b_inverse[:, None], b_high * b_inverse[:, None]
    DTYPE: tl.constexpr = p_cache.dtype.element_ty
    tl.store(p_cache + o_row + o_low[None, :], cache_from(b_low, KIND, DTYPE), mask=m)
    tl.store(p_cache + o_row + o_high[None, :], cache_from(b_high, KIND, DTYPE), mask=m)


# One binary for every number of tokens, so that it cannot change how a head is summed.
@triton.jit(do_not_specialize=["num_tokens"])
def rope_kv_write_kernel(
    p_q,
    p_k,
    p_v,
    p_cos,
    p_sin,
    p_slots,
    p_q_norm,
    p_k_norm,
    p_out,
    p_k_cache,
    p_v_cache,
    p_k_scale,
    p_v_scale,
    num_tokens,
    num_slots,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    offset_stride,
    head_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    ANGLE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """(low, high) -> (low cos - high sin, high cos + low sin) for q and k, after their norms."""
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    o_low, o_high = _pairs(D, ROTARY, PAIRS)
    m_p = tl.arange(0, PAIRS) < D // 2
    o_p = tl.arange(0, PAIRS)[None, :]
    num_q_programs = tl.cdiv(num_tokens * HQ, ROWS)
    i_program = tl.program_id(0)
    if i_program < num_q_programs:
        i_row = i_program * ROWS + tl.arange(0, ROWS)
        i_token, i_head = (i_row // HQ).to(tl.int64), i_row % HQ
        m_row = i_row < num_tokens * HQ
        m = m_row[:, None] & m_p[None, :]
        m_angle = m_row[:, None] & (o_p < ROTARY // 2)
        o_q = (i_token * q_token_stride + i_head * q_head_stride)[:, None]
        b_low = tl.load(p_q + o_q + o_low[None, :], mask=m, other=0.0).to(tl.float32)
        b_high = tl.load(p_q + o_q + o_high[None, :], mask=m, other=0.0).to(tl.float32)
        if Q_NORM:
            b_low, b_high = _normed(b_low, b_high, p_q_norm, o_low, o_high, m_p, eps, D, DTYPE)
        o_angle = (i_token * ANGLE_STRIDE)[:, None] + o_p
        b_low, b_high = _rotated(b_low, b_high, p_cos, p_sin, o_angle, m_angle, DTYPE)
        o_out = i_row.to(tl.int64)[:, None] * D
        tl.store(p_out + o_out + o_low[None, :], b_low, mask=m)
        tl.store(p_out + o_out + o_high[None, :], b_high, mask=m)
    else:
        i_row = (i_program - num_q_programs) * ROWS + tl.arange(0, ROWS)
        i_token, i_head = (i_row // HKV).to(tl.int64), i_row % HKV
        i_slot = tl.load(p_slots + i_token, mask=i_row < num_tokens * HKV, other=-1)
        m_row = (i_slot >= 0) & (i_slot < num_slots)
        m = m_row[:, None] & m_p[None, :]
        m_angle = m_row[:, None] & (o_p < ROTARY // 2)
        o_k = (i_token * k_token_stride + i_head * k_head_stride)[:, None]
        o_v = (i_token * v_token_stride + i_head * v_head_stride)[:, None]
        b_low = tl.load(p_k + o_k + o_low[None, :], mask=m, other=0.0).to(tl.float32)
        b_high = tl.load(p_k + o_k + o_high[None, :], mask=m, other=0.0).to(tl.float32)
        b_v_low = tl.load(p_v + o_v + o_low[None, :], mask=m, other=0.0)
        b_v_high = tl.load(p_v + o_v + o_high[None, :], mask=m, other=0.0)
        if K_NORM:
            b_low, b_high = _normed(b_low, b_high, p_k_norm, o_low, o_high, m_p, eps, D, DTYPE)
        o_angle = (i_token * ANGLE_STRIDE)[:, None] + o_p
        b_low, b_high = _rotated(b_low, b_high, p_cos, p_sin, o_angle, m_angle, DTYPE)
        o_row = i_slot // BLOCK_SIZE * block_stride + i_slot % BLOCK_SIZE * offset_stride
        o_row = (o_row + i_head * head_stride)[:, None]
        o_scale = i_slot * HKV + i_head
        _write(b_low, b_high, p_k_cache, p_k_scale, o_row, o_scale, o_low, o_high, m_row, m, KIND)
        _write(
            b_v_low, b_v_high, p_v_cache, p_v_scale, o_row, o_scale, o_low, o_high, m_row, m, KIND
        )
