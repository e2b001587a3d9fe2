"""A matrix product by fixed tiles: one order of summation per output, whatever the batch."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import narrow

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


# One binary for every number of rows: none is compiled while serving, none sums otherwise.
@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    p_x,
    p_weight,
    p_bias,
    p_out,
    M,
    N,
    K,
    x_stride,
    weight_stride,
    TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[m, n] = sum_k x[m, k] * weight[n, k] + bias[n], k in steps of BLOCK_K from 0.

    Persistent: programs take output tiles in turn, in groups of GROUP_M tile rows that share their
    weight tiles in L2. p_x, p_weight, p_out are tensor descriptors when TMA, else pointers.
    """
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for i_tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=TMA):
        i_m, i_n = _tile_of(i_tile, num_m, num_n, GROUP_M)
        b_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            b_x = _load(p_x, i_m * BLOCK_M, k, M, K, x_stride, TMA, BLOCK_M, BLOCK_K)
            b_w = _load(p_weight, i_n * BLOCK_N, k, N, K, weight_stride, TMA, BLOCK_N, BLOCK_K)
            b_acc = _dot(b_x, b_w.T, b_acc)
        # In two halves, so that the tile on its way out leaves shared memory to one more stage.
        b_halves = b_acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1)
        b_left, b_right = b_halves.split()
        o_m, o_n = i_m * BLOCK_M, i_n * BLOCK_N
        _store(p_out, p_bias, b_left, o_m, o_n, M, N, TMA)
        _store(p_out, p_bias, b_right, o_m, o_n + BLOCK_N // 2, M, N, TMA)


@triton.jit
def _tile_of(i_tile, num_m, num_n, GROUP_M: tl.constexpr):
    """Row and column of an output tile: down GROUP_M tile rows, then one to the right."""
    per_group = GROUP_M * num_n
    i_first = (i_tile // per_group) * GROUP_M
    num_rows = min(num_m - i_first, GROUP_M)
    i_in_group = i_tile % per_group
    return i_first + i_in_group % num_rows, i_in_group // num_rows


@triton.jit
def _load(
    p_a,
    i_row,
    i_col,
    num_rows,
    num_cols,
    stride,
    TMA: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Tile [R, C] of a matrix at (i_row, i_col); zeros outside of it."""
    if TMA:
        return p_a.load([i_row, i_col])
    else:
        o_r, o_c = i_row + tl.arange(0, R), i_col + tl.arange(0, C)
        m_a = (o_r < num_rows)[:, None] & (o_c < num_cols)[None, :]
        return tl.load(p_a + o_r.to(tl.int64)[:, None] * stride + o_c[None, :], mask=m_a, other=0.0)


@triton.jit
def _store(p_out, p_bias, b_acc, i_row, i_col, M, N, TMA: tl.constexpr):
    """Bias added in float32, one rounding, and out with the part of the tile inside of [M, N]."""
    o_n = i_col + tl.arange(0, b_acc.shape[1])
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_n, mask=o_n < N, other=0.0).to(tl.float32)[None, :]
    if TMA:
        p_out.store([i_row, i_col], narrow(b_acc, p_out.dtype))
    else:
        b_out = narrow(b_acc, p_out.dtype.element_ty)
        o_m = i_row + tl.arange(0, b_acc.shape[0])
        m_out = (o_m < M)[:, None] & (o_n < N)[None, :]
        tl.store(p_out + o_m.to(tl.int64)[:, None] * N + o_n[None, :], b_out, mask=m_out)


@triton.jit
def _dot(b_a, b_b, b_acc):
    """acc + a @ b. float32 operands are multiplied as they are, never cut to TF32."""
    if _INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, acc=b_acc, input_precision="ieee")
