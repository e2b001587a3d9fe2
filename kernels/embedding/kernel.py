"""Embedding: a copy of rows, or zeros."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def embedding_kernel(
    p_ids,
    p_weight,
    p_out,
    weight_stride,
    num_rows,
    shard_start,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[t] = weight[ids[t] - shard_start] where that row exists, else 0; BLOCK elements of one
    row per program.
    """
    TILES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    i_token = (tl.program_id(0) // TILES).to(tl.int64)
    o_c = tl.program_id(0) % TILES * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < SIZE
    i_row = tl.load(p_ids + i_token) - shard_start
    m_row = (i_row >= 0) & (i_row < num_rows)
    b_row = tl.load(p_weight + i_row * weight_stride + o_c, mask=m_c & m_row, other=0.0)
    tl.store(p_out + i_token * SIZE + o_c, b_row, mask=m_c)
