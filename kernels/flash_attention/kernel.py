"""Device code of flash_attention: one program attends for one tile of rows of one query head.

Names: positions count a sequence's tokens from 0; keys are visited in tiles of BLOCK_N that begin
at multiples of BLOCK_N, whatever tile or chunk a row is in, so that a row's sums always have the
same terms in the same order. A head dimension that is no power of two has a tail: 96 = 64 + 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.flash_attention.tiles import convert, fold, load, load_rows, load_scales
from kvferry.kernels.language import narrow


# Tables grow with the step: a stride that was part of the code would compile anew.
@triton.jit(do_not_specialize=["table_stride"])
def flash_attention_kernel(
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_out,
    desc_k,
    desc_v,
    desc_k_tail,
    desc_v_tail,
    p_tiles,
    p_tables,
    p_starts,
    p_context,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    scale,
    cap,
    window,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    TMA: tl.constexpr,
):
    """out = softmax(cap(scale * q @ k^T)) @ v with an online softmax in base 2.

    Keys are visited in three runs: masked tiles where the window begins, full tiles, masked tiles
    at the diagonal. ``scale`` takes a raw score to base 2 (CAPPED: to the argument of cap_scores).
    """
    i_tile = tl.program_id(0) // NUM_HEADS
    i_head = tl.program_id(0) % NUM_HEADS
    i_seq = tl.load(p_tiles + 2 * i_tile)
    i_row = tl.load(p_tiles + 2 * i_tile + 1)
    i_start = tl.load(p_starts + i_seq)
    num_rows = tl.minimum(BLOCK_M, tl.load(p_starts + i_seq + 1) - i_start - i_row)
    i_first = tl.load(p_context + i_seq) + i_row
    i_end = i_first + num_rows

    o_m = tl.arange(0, BLOCK_M)
    o_head = tl.arange(0, HEAD)
    o_row = (i_start + i_row + o_m).to(tl.int64)
    m_row = o_m < num_rows
    p_rows = p_q + o_row * q_token_stride + i_head * q_head_stride
    b_q = tl.load(p_rows[:, None] + o_head[None, :], mask=m_row[:, None], other=0.0)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    b_acc = tl.zeros([BLOCK_M, HEAD], tl.float32)
    if TAIL:
        o_tail = HEAD + tl.arange(0, TAIL)
        b_q_tail = tl.load(p_rows[:, None] + o_tail[None, :], mask=m_row[:, None], other=0.0)
        b_acc_tail = tl.zeros([BLOCK_M, TAIL], tl.float32)
    else:
        b_q_tail = b_q
        b_acc_tail = b_max

    i_kv_head = i_head // GROUP
    q = (b_q, b_q_tail)
    state = (b_acc, b_acc_tail, b_max, b_sum)
    cache = (
        p_k + i_kv_head.to(tl.int64) * head_stride,
        p_v + i_kv_head.to(tl.int64) * head_stride,
        p_k_scale,
        p_v_scale,
        p_tables + i_seq.to(tl.int64) * table_stride,
        block_stride,
        token_stride,
        i_kv_head,
        NUM_HEADS // GROUP,
    )
    i_full_end = (i_first + 1) // BLOCK_N * BLOCK_N
    i_full = 0
    i_key = 0
    if WINDOWED:
        i_key = tl.maximum(0, i_first - window + 1)
        i_full = tl.cdiv(tl.maximum(0, i_end - window), BLOCK_N) * BLOCK_N
        state = attend(
            q, state, cache, i_key // BLOCK_N * BLOCK_N, i_full, o_m + i_first, i_key, i_end,
            scale, cap, window, HEAD, TAIL, BLOCK_SIZE, BLOCK_N, KIND, CAPPED, True, True,
        )  # fmt: skip
    if TMA:
        descs = (desc_k, desc_v, desc_k_tail, desc_v_tail)
        state = attend_tma(
            q, state, cache, descs, i_full, i_full_end,
            scale, cap, HEAD, TAIL, BLOCK_SIZE, BLOCK_N, KIND, CAPPED,
        )  # fmt: skip
    else:
        state = attend(
            q, state, cache, i_full, i_full_end, o_m + i_first, i_key, i_end,
            scale, cap, window, HEAD, TAIL, BLOCK_SIZE, BLOCK_N, KIND, CAPPED, False, False,
        )  # fmt: skip
    state = attend(
        q, state, cache, tl.maximum(i_full, i_full_end), i_end, o_m + i_first, i_key, i_end,
        scale, cap, window, HEAD, TAIL, BLOCK_SIZE, BLOCK_N, KIND, CAPPED, True, WINDOWED,
    )  # fmt: skip
    b_acc, b_acc_tail, b_max, b_sum = state
    # Rows after the chunk's last may have seen nothing.
    b_inverse = 1.0 / tl.where(b_sum == 0.0, 1.0, b_sum)
    p_rows = p_out + o_row * out_token_stride + i_head * out_head_stride
    b_out = narrow(b_acc * b_inverse[:, None], p_out.dtype.element_ty)
    tl.store(p_rows[:, None] + o_head[None, :], b_out, mask=m_row[:, None])
    if TAIL:
        b_out = narrow(b_acc_tail * b_inverse[:, None], p_out.dtype.element_ty)
        tl.store(p_rows[:, None] + o_tail[None, :], b_out, mask=m_row[:, None])


@triton.jit
def attend(
    q,
    state,
    cache,
    i_begin,
    i_end,
    o_position,
    i_first_key,
    i_end_key,
    scale,
    cap,
    window,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Visit the keys [i_begin, i_end), each at the address that the block table gives it.

    MASKED: only the keys [i_first_key, i_end_key) are read, others may be anything, even NaN.
    """
    p_k, p_v, p_k_scale, p_v_scale, p_table, block_stride, token_stride, i_kv_head, kv_heads = cache
    DTYPE: tl.constexpr = q[0].dtype
    b_acc, b_acc_tail, b_max, b_sum = state
    for i_key in tl.range(i_begin, i_end, BLOCK_N):
        o_key = i_key + tl.arange(0, BLOCK_N)
        m_key = (o_key >= i_first_key) & (o_key < i_end_key) if MASKED else None
        b_block = load(p_table + o_key // BLOCK_SIZE, m_key, MASKED)
        o_token = b_block.to(tl.int64) * block_stride + (o_key % BLOCK_SIZE) * token_stride
        p_key, p_value = p_k + o_token, p_v + o_token
        kv = load_rows(p_key, p_value, m_key, 0, HEAD, KIND, DTYPE, MASKED)
        tail = load_rows(p_key, p_value, m_key, HEAD, TAIL, KIND, DTYPE, MASKED) if TAIL else kv
        scales = load_scales(
            p_k_scale, p_v_scale, b_block, o_key, m_key,
            i_kv_head, kv_heads, BLOCK_SIZE, KIND, MASKED,
        )  # fmt: skip
        m_seen = None
        if MASKED:
            m_seen = o_position[:, None] >= o_key[None, :]
            if WINDOWED:
                m_seen = m_seen & (o_position[:, None] < o_key[None, :] + window)
        b_acc, b_acc_tail, b_max, b_sum = fold(
            q, kv, tail, scales, m_seen, (b_acc, b_acc_tail, b_max, b_sum),
            scale, cap, TAIL, KIND, CAPPED, MASKED,
        )  # fmt: skip
    return b_acc, b_acc_tail, b_max, b_sum


@triton.jit
def attend_tma(
    q,
    state,
    cache,
    descs,
    i_begin,
    i_end,
    scale,
    cap,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Visit the keys [i_begin, i_end), all visible, by tensor memory accelerator: a tile of keys
    lies in one block (BLOCK_SIZE is a multiple of BLOCK_N).
    """
    _, _, p_k_scale, p_v_scale, p_table, _, _, i_kv_head, kv_heads = cache
    desc_k, desc_v, desc_k_tail, desc_v_tail = descs
    DTYPE: tl.constexpr = q[0].dtype
    b_acc, b_acc_tail, b_max, b_sum = state
    # A tile's block is known one step before the tile is fetched: no load waits for a load.
    i_next = tl.load(p_table + i_begin // BLOCK_SIZE, mask=i_begin < i_end, other=0)
    for i_key in tl.range(i_begin, i_end, BLOCK_N):
        i_block = i_next
        i_after = i_key + BLOCK_N
        i_next = tl.load(p_table + i_after // BLOCK_SIZE, mask=i_after < i_end, other=0)
        where = [i_block, i_kv_head, i_key % BLOCK_SIZE, 0]
        kv = (
            convert(desc_k.load(where).reshape(BLOCK_N, HEAD), KIND, DTYPE),
            convert(desc_v.load(where).reshape(BLOCK_N, HEAD), KIND, DTYPE),
        )
        if TAIL:
            where = [i_block, i_kv_head, i_key % BLOCK_SIZE, HEAD]
            tail = (
                convert(desc_k_tail.load(where).reshape(BLOCK_N, TAIL), KIND, DTYPE),
                convert(desc_v_tail.load(where).reshape(BLOCK_N, TAIL), KIND, DTYPE),
            )
        else:
            tail = kv
        o_key = i_key + tl.arange(0, BLOCK_N)
        scales = load_scales(
            p_k_scale, p_v_scale, i_block, o_key, None,
            i_kv_head, kv_heads, BLOCK_SIZE, KIND, False,
        )  # fmt: skip
        b_acc, b_acc_tail, b_max, b_sum = fold(
            q, kv, tail, scales, None, (b_acc, b_acc_tail, b_max, b_sum),
            scale, cap, TAIL, KIND, CAPPED, False,
        )  # fmt: skip
    return b_acc, b_acc_tail, b_max, b_sum
