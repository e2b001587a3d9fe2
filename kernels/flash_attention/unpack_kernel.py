"""Device code that brings the keys and values of a prefill step into a workspace."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import FLOAT, cache_to, narrow


# Tables grow with the step: a stride that was part of the code would compile anew.
@triton.jit(do_not_specialize=["table_stride"])
def unpack_kernel(
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_k_out,
    p_v_out,
    p_blocks,
    p_tables,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
    KIND: tl.constexpr,
):
    """out = element * scale in float32, rounded once, for TOKENS tokens of one KV head. (An element
    of a FLOAT cache has no scale.)

    WIDTH: the least power of two that HEAD_DIM fits in. Tokens past a sequence's end are neither
    read nor written.
    """
    PARTS: tl.constexpr = BLOCK_TOKENS // TOKENS
    i_head = tl.program_id(0) % NUM_HEADS
    i_part = tl.program_id(0) // NUM_HEADS % PARTS
    i_block = tl.program_id(0) // NUM_HEADS // PARTS
    i_seq = tl.load(p_blocks + 3 * i_block)
    i_first = tl.load(p_blocks + 3 * i_block + 1)
    num_tokens = tl.load(p_blocks + 3 * i_block + 2)

    o_in_block = i_part * TOKENS + tl.arange(0, TOKENS)
    o_d = tl.arange(0, WIDTH)
    m_token = o_in_block < num_tokens
    m_x = m_token[:, None] & (o_d < HEAD_DIM)[None, :]
    o_token = i_first + o_in_block
    p_table = p_tables + i_seq.to(tl.int64) * table_stride
    b_block = tl.load(p_table + o_token // BLOCK_SIZE, mask=m_token, other=0).to(tl.int64)
    o_row = b_block * block_stride + (o_token % BLOCK_SIZE) * token_stride
    o_x = (o_row + i_head.to(tl.int64) * head_stride)[:, None] + o_d[None, :]
    o_out = (i_block.to(tl.int64) * BLOCK_TOKENS + o_in_block) * NUM_HEADS + i_head
    o_out = (o_out * HEAD_DIM)[:, None] + o_d[None, :]
    b_k = tl.load(p_k + o_x, mask=m_x, other=0)
    b_v = tl.load(p_v + o_x, mask=m_x, other=0)
    if KIND == FLOAT:
        b_k, b_v = b_k.to(tl.float32), b_v.to(tl.float32)
    else:
        o_scale = (b_block * BLOCK_SIZE + o_token % BLOCK_SIZE) * NUM_HEADS + i_head
        b_k_scale = tl.load(p_k_scale + o_scale, mask=m_token, other=0.0)
        b_v_scale = tl.load(p_v_scale + o_scale, mask=m_token, other=0.0)
        b_k = cache_to(b_k, KIND, tl.float32) * b_k_scale[:, None]
        b_v = cache_to(b_v, KIND, tl.float32) * b_v_scale[:, None]
    tl.store(p_k_out + o_out, narrow(b_k, p_k_out.dtype.element_ty), mask=m_x)
    tl.store(p_v_out + o_out, narrow(b_v, p_v_out.dtype.element_ty), mask=m_x)
