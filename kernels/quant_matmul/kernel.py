"""Products with weights of 4 and 8 bits: codes become bf16 or fp16 in registers, in the places
where the matrix instruction reads them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import dot, narrow
from kvferry.kernels.quant_matmul.unpack import unpack_4, unpack_8

UNIT = tl.constexpr(128)
SLICE = tl.constexpr(32)


@triton.jit
def quant_matmul_kernel(
    p_x,
    p_packed,
    p_scales,
    p_zeros,
    p_bias,
    p_out,
    M,
    N,
    K,
    x_stride,
    units_per_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[m, n] = sum_g scale[g, n] * sum_{k in g} x[m, k] * (code[n, k] - zero[g, n]) + bias[n].

    The inner sum is a matrix product of integers with x, exact in each term; the outer one is in
    float32. The tile is transposed, [BLOCK_N, BLOCK_M], so that the weights are the operand which
    a matrix instruction takes from registers. SPLIT: out is float32 [splits, M, N], without bias.
    """
    i_n, i_m, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_j = tl.arange(0, SLICE)
    m_n, m_m = o_n < N, o_m < M
    WORDS: tl.constexpr = 8 * BITS
    PER_WORD: tl.constexpr = 16 // BITS
    i_first = i_split * units_per_split
    i_last = min(i_first + units_per_split, tl.cdiv(K, UNIT))
    unit_stride = tl.full([], WORDS, tl.int64) * N
    p_rows = p_packed + o_n.to(tl.int64)[:, None] * WORDS + o_j[None, :]
    p_x_rows = p_x + o_m.to(tl.int64)[None, :] * x_stride + o_j[:, None]
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_unit in range(i_first, i_last):
        p_unit = p_rows + i_unit * unit_stride
        for i_slice in tl.static_range(UNIT // SLICE):
            if i_slice % PER_WORD == 0:
                p_run = p_unit + (i_slice // PER_WORD) * SLICE
                b_words = tl.load(p_run, mask=m_n[:, None], other=0)
            o_k = i_unit * UNIT + i_slice * SLICE
            m_x = m_m[None, :] & (o_k + o_j < K)[:, None]
            b_x = tl.load(p_x_rows + o_k, mask=m_x, other=0.0)
            if (i_slice * SLICE) % GROUP == 0:
                o_g = (o_k // GROUP) * N + o_n
                m_g = m_n & (o_k < K)
                b_scale = tl.load(p_scales + o_g, mask=m_g, other=0.0).to(tl.float32)
                b_part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                b_zero = tl.full([1, 1], 8, tl.int16)
                if p_zeros is not None:
                    b_zero = tl.load(p_zeros + o_g, mask=m_g, other=0).to(tl.int16)[:, None]
            if BITS == 4:
                b_w = unpack_4(b_words, 4 * (i_slice % 4), b_zero, p_x.dtype.element_ty)
            else:
                b_w = unpack_8(b_words, 8 * (i_slice % 2), p_x.dtype.element_ty)
            b_part = dot(b_w, b_x, b_part)
            if (i_slice * SLICE + SLICE) % GROUP == 0:
                b_acc += b_part * b_scale[:, None]
    m_out = m_m[None, :] & m_n[:, None]
    p_tile = p_out + (i_split * M + o_m).to(tl.int64)[None, :] * N + o_n[:, None]
    if SPLIT:
        tl.store(p_tile, b_acc, mask=m_out)
    else:
        if p_bias is not None:
            b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        tl.store(p_tile, narrow(b_acc, p_out.dtype.element_ty), mask=m_out)


@triton.jit
def sum_splits_kernel(p_parts, p_bias, p_out, size, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, n] = sum_s parts[s, m, n] + bias[n], in the order of s. ``size`` is M * N."""
    o_mn = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_mn = o_mn < size
    b_acc = tl.zeros([BLOCK], tl.float32)
    for i_split in tl.static_range(SPLITS):
        b_acc += tl.load(p_parts + i_split * size + o_mn, mask=m_mn, other=0.0)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_mn % N, mask=m_mn, other=0.0).to(tl.float32)
    tl.store(p_out + o_mn, narrow(b_acc, p_out.dtype.element_ty), mask=m_mn)
