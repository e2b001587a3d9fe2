"""RMSNorm with an optional residual sum: one program per row or few short rows."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import narrow


@triton.jit
def _scaled(b_x, b_mean_square, b_weight, eps, UNIT_OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """x / sqrt(mean(x^2) + eps), times the weight. x float32 [ROWS, BLOCK], mean [ROWS], weight
    [BLOCK].
    """
    b_normed = b_x * tl.rsqrt(b_mean_square + eps)[:, None]
    b_weight = b_weight.to(tl.float32)[None, :]
    if UNIT_OFFSET:
        return narrow(b_normed * (1.0 + b_weight), DTYPE)
    else:
        return narrow(narrow(b_normed, DTYPE).to(tl.float32) * b_weight, DTYPE)


@triton.jit
def _sum_of(p_x, p_residual, o_x, o_residual, m, ADD: tl.constexpr):
    """x, or x + residual as the next layer will read it: rounded to the type of x. float32."""
    b_x = tl.load(p_x + o_x, mask=m, other=0.0).to(tl.float32)
    if ADD:
        b_x += tl.load(p_residual + o_residual, mask=m, other=0.0).to(tl.float32)
        b_x = narrow(b_x, p_x.dtype.element_ty).to(tl.float32)
    return b_x


# One binary for every number of rows, so that it cannot change how a row is summed.
@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    num_rows,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = x + residual (ADD); out = weight * total / sqrt(mean(total^2) + eps).

    Rows stay in registers: BLOCK >= SIZE.
    """
    i_rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_c = tl.arange(0, BLOCK)
    m_c = o_c < SIZE
    m = (i_rows < num_rows)[:, None] & m_c[None, :]
    o_x = i_rows[:, None] * x_stride + o_c[None, :]
    o_out = i_rows[:, None] * SIZE + o_c[None, :]
    b_x = _sum_of(p_x, p_residual, o_x, o_out, m, ADD)
    b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0)
    if ADD:
        tl.store(p_total + o_out, narrow(b_x, p_total.dtype.element_ty), mask=m)
    b_mean_square = tl.sum(b_x * b_x, axis=1) / SIZE
    b_out = _scaled(b_x, b_mean_square, b_weight, eps, UNIT_OFFSET, p_out.dtype.element_ty)
    tl.store(p_out + o_out, b_out, mask=m)


@triton.jit
def rms_norm_long_kernel(
    p_x,
    p_residual,
    p_weight,
    p_out,
    p_total,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same for one row per program that is too long for registers: BLOCK elements at a time.

    A second pass reads the row again, from the L2 cache. It adds x and residual anew rather than
    read the total back, which other threads may have stored.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_row = i_row * tl.full((1, 1), 1, tl.int64)
    b_squares = tl.zeros((1, BLOCK), tl.float32)
    for start in range(0, SIZE, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        m = (o_c < SIZE)[None, :]
        o_out = o_row * SIZE + o_c[None, :]
        b_x = _sum_of(p_x, p_residual, o_row * x_stride + o_c[None, :], o_out, m, ADD)
        if ADD:
            tl.store(p_total + o_out, narrow(b_x, p_total.dtype.element_ty), mask=m)
        b_squares += b_x * b_x
    b_mean_square = tl.sum(b_squares, axis=1) / SIZE
    for start in range(0, SIZE, BLOCK):
        o_c = start + tl.arange(0, BLOCK)
        m_c = o_c < SIZE
        o_out = o_row * SIZE + o_c[None, :]
        m = m_c[None, :]
        b_x = _sum_of(p_x, p_residual, o_row * x_stride + o_c[None, :], o_out, m, ADD)
        b_weight = tl.load(p_weight + o_c, mask=m_c, other=0.0)
        b_out = _scaled(b_x, b_mean_square, b_weight, eps, UNIT_OFFSET, p_out.dtype.element_ty)
        tl.store(p_out + o_out, b_out, mask=m)
