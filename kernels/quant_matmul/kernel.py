"""Products with weights of 4 and 8 bits: codes become bf16 or fp16 in registers, in the places
where the matrix instruction reads them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import dot, narrow
from kvferry.kernels.quant_matmul.unpack import unpack_4, unpack_4_zero, unpack_8

UNIT = tl.constexpr(128)
SLICE = tl.constexpr(32)


# One binary for every number of rows: none is compiled while serving, none sums otherwise.
@triton.jit(do_not_specialize=["M"])
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
    num_splits,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[m, n] = sum_g scale[g, n] * sum_{k in g} x[m, k] * (code[n, k] - zero[g, n]) + bias[n].

    The inner sum is a matrix product of integers with x, exact in each term; the outer one is in
    float32. The tile is transposed, [BLOCK_N, BLOCK_M], so that the weights are the operand which
    a matrix instruction takes from registers. SPLIT: out is float32 [splits, M, N], a program per
    split, and no bias. FOLD: one program sums all splits, in the order of ``sum_splits_kernel``.
    """
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows outside of the matrices read the last one instead of a mask per load; nobody stores them.
    o_row_n = tl.minimum(o_n, N - 1).to(tl.int64)
    o_row_m = tl.minimum(o_m, M - 1).to(tl.int64)
    p_x_rows = p_x + o_row_m * x_stride
    row_stride = tl.full([], 1, tl.int64) * N
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if FOLD:
        for i_part in range(num_splits):
            b_acc += _sum_of_split(
                p_x_rows,
                p_packed,
                p_scales,
                p_zeros,
                o_row_n,
                row_stride,
                K,
                i_part,
                units_per_split,
                BITS,
                GROUP,
                EVEN_K,
            )
    else:
        b_acc = _sum_of_split(
            p_x_rows,
            p_packed,
            p_scales,
            p_zeros,
            o_row_n,
            row_stride,
            K,
            i_split,
            units_per_split,
            BITS,
            GROUP,
            EVEN_K,
        )
    m_n = o_n < N
    p_tile = p_out + i_split * row_stride * M + o_m.to(tl.int64)[None, :] * N + o_n[:, None]
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    b_out = b_acc if SPLIT else narrow(b_acc, p_out.dtype.element_ty)
    tl.store(p_tile, b_out, mask=(o_m < M)[None, :] & m_n[:, None])


@triton.jit
def _sum_of_split(
    p_x_rows,
    p_packed,
    p_scales,
    p_zeros,
    o_row_n,
    row_stride,
    K,
    i_split,
    units_per_split,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """The sum over a split's units, for rows ``o_row_n`` of the weight and ``p_x_rows`` of x."""
    BLOCK_N: tl.constexpr = o_row_n.shape[0]
    BLOCK_M: tl.constexpr = p_x_rows.shape[0]
    DTYPE: tl.constexpr = p_x_rows.dtype.element_ty
    WORDS: tl.constexpr = 8 * BITS
    PER_WORD: tl.constexpr = 16 // BITS
    GROUPS: tl.constexpr = UNIT // GROUP
    o_j = tl.arange(0, SLICE)
    p_x_tile = p_x_rows[None, :] + o_j[:, None]
    p_words = p_packed + o_row_n[:, None] * WORDS + o_j[None, :]
    p_rows = p_scales + o_row_n[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    i_first = i_split * units_per_split
    i_last = min(i_first + units_per_split, tl.cdiv(K, UNIT))
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_next = tl.load(p_rows + i_first * row_stride * GROUPS)
    for i_unit in range(i_first, i_last):
        # Scales are too few for the asynchronous copies that bring words and x: one unit ahead.
        b_scales = b_next
        b_next = tl.load(p_rows + min(i_unit + 1, i_last - 1) * row_stride * GROUPS)
        for i_slice in tl.static_range(UNIT // SLICE):
            if i_slice % PER_WORD == 0:
                i_run = (i_slice // PER_WORD) * SLICE
                b_words = tl.load(p_words + i_unit * row_stride * WORDS + i_run)
            o_k = i_unit * UNIT + i_slice * SLICE
            if EVEN_K:
                b_x = tl.load(p_x_tile + o_k)
            else:
                b_x = tl.load(p_x_tile + o_k, mask=(o_k + o_j < K)[:, None], other=0.0)
            if (i_slice * SLICE) % GROUP == 0:
                i_group = i_slice * SLICE // GROUP
                b_part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                if p_zeros is not None:
                    o_zero = i_unit * row_stride * GROUPS + o_row_n * GROUPS + i_group
                    b_zero = tl.load(p_zeros + o_zero)[:, None]
            if BITS == 8:
                b_w = unpack_8(b_words, 8 * (i_slice % 2), DTYPE)
            elif p_zeros is not None:
                b_w = unpack_4_zero(b_words, 4 * i_slice, b_zero, DTYPE)
            else:
                b_w = unpack_4(b_words, 4 * i_slice, DTYPE)
            b_part = dot(b_w, b_x, b_part)
            if (i_slice * SLICE + SLICE) % GROUP == 0:
                b_acc += b_part * _column(b_scales, i_group, GROUPS).to(tl.float32)
    return b_acc


@triton.jit
def _column(b_x, COLUMN: tl.constexpr, NUM: tl.constexpr):
    """Column COLUMN of [R, NUM] as [R, 1]; NUM is 1, 2 or 4."""
    if NUM == 1:
        return b_x
    else:
        # The last bit of the column picks from pairs, the other one from what is left.
        b_even, b_odd = tl.split(b_x.reshape(b_x.shape[0], NUM // 2, 2))
        return _column(b_odd if COLUMN % 2 else b_even, COLUMN // 2, NUM // 2)


@triton.jit(do_not_specialize=["M"])
def sum_splits_kernel(p_parts, p_bias, p_out, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """out[m, n] = sum_s parts[s, m, n] + bias[n], in the order of s."""
    o_mn = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # M is of any size and N says which addresses are aligned, as the mask has to know too.
    size = M.to(tl.int64) * N
    m_mn = o_mn < size
    b_acc = tl.zeros([BLOCK], tl.float32)
    for i_split in tl.static_range(SPLITS):
        b_acc += tl.load(p_parts + i_split * size + o_mn, mask=m_mn, other=0.0)
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_mn % N, mask=m_mn, other=0.0).to(tl.float32)
    tl.store(p_out + o_mn, narrow(b_acc, p_out.dtype.element_ty), mask=m_mn)
