"""Split-KV attention over the paged cache, and the merge of its partial results.

Shapes: S sequences, T tokens, P programs, H KV heads, R = group x queries rows per KV head, D head
dimension, M rows and N keys of one tile. Row r of a KV head is query r // group, head r % group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.flash_decoding.splits import ITEM_FIELDS
from kvferry.kernels.flash_decoding.unpack import unpack
from kvferry.kernels.language import FLOAT, dot, narrow

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)


@triton.jit
def _load_query(p_q, o_q, m_q, DTYPE: tl.constexpr):
    """Rows of q in DTYPE and their factors: q = rows x factors. [M, D], [M, 1].

    Where DTYPE is q's own the factors are 1; else they are powers of two that bring a row's largest
    magnitude between 1 and 2, so that bf16 fits in float16 without rounding.
    """
    b_q = tl.load(p_q + o_q, mask=m_q, other=0.0)
    if b_q.dtype == DTYPE:
        return b_q, tl.full([b_q.shape[0], 1], 1.0, tl.float32)
    else:
        b_wide = b_q.to(tl.float32)
        b_largest = tl.maximum(tl.max(tl.abs(b_wide), 1), 1e-30)
        b_exponent = b_largest.to(tl.uint32, bitcast=True) & 0x7F800000
        b_factor = b_exponent.to(tl.float32, bitcast=True)[:, None]
        return narrow(b_wide / b_factor, DTYPE), b_factor


@triton.jit
def _soft_cap(b_x, cap):
    """cap * tanh(x / cap) for x and the result in units of log2; |tanh| = (1 - e) / (1 + e)."""
    b_e = tl.exp2(tl.abs(b_x) * (-2.0 / cap))
    b_capped = (cap * _LOG2E) * ((1.0 - b_e) / (1.0 + b_e))
    return tl.where(b_x < 0.0, -b_capped, b_capped)


@triton.jit
def _is_visible(o_key, start, end, WINDOW: tl.constexpr):
    """Whether some query sees a key; only a window hides early ones."""
    return (o_key < end) & (o_key >= start) if WINDOW else o_key < end


@triton.jit
def _hide(b_s, o_key, b_position, window, WINDOW: tl.constexpr):
    """Scores, -inf for keys that a query does not see. b_position [M, 1], o_key [1, N]."""
    m_s = o_key <= b_position
    if WINDOW:
        m_s = m_s & (o_key > b_position - window)
    return tl.where(m_s, b_s, -float("inf"))


@triton.jit
def _block_of(
    p_table,
    i_tile,
    start,
    end,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The block of each key of a tile, or of the tile where it lies in one. int64 [N] or scalar."""
    if BLOCK_SIZE % BLOCK_N == 0:
        p_block = p_table + i_tile // (BLOCK_SIZE // BLOCK_N)
        return tl.load(p_block, mask=i_tile * BLOCK_N < end, other=0).to(tl.int64)
    else:
        o_key = i_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_key = _is_visible(o_key, start, end, WINDOW)
        return tl.load(p_table + o_key // BLOCK_SIZE, mask=m_key, other=0).to(tl.int64)


@triton.jit
def _add_scaled(b_acc, b_p, b_scale, b_v, INVARIANT: tl.constexpr, DTYPE: tl.constexpr):
    """acc + (p * scale) @ v of one tile: weights [M, N], scales [N], elements of a cache [N, D]."""
    if INVARIANT:
        # bf16 holds every element of a cache, and weights of any size.
        b_weight = narrow(b_p * b_scale[None, :], tl.bfloat16)
        return dot(b_weight, narrow(b_v.to(tl.float32), tl.bfloat16), b_acc)
    else:
        # Relative to the tile's largest scale, weights stay within [0, 1], as float16 needs them.
        # Which is the largest depends on the other queries of a draft.
        largest = tl.maximum(tl.max(b_scale, 0), 1e-30)
        b_weight = narrow(b_p * (b_scale / largest)[None, :], DTYPE)
        return b_acc + dot(b_weight, b_v, tl.zeros_like(b_acc)) * largest


# What differs from step to step is no part of the code: nothing is compiled between two steps.
@triton.jit(do_not_specialize=["table_stride"])
def flash_decoding_kernel(
    p_q,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    p_tables,
    p_context_lens,
    p_query_starts,
    p_items,
    p_program_items,
    p_partial_out,
    p_partial_lse,
    scale,
    softcap,
    window,
    q_token_stride,
    q_head_stride,
    kv_block_stride,
    kv_slot_stride,
    kv_head_stride,
    table_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    INVARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Of each item: out[r] = sum_n p[r, n] v[n] / sum_n p[r, n] with p = 2^(s - max s) and
    s = scale log2(e) q k^T, and lse[r] = max s + log2(sum_n p[r, n]). Grid (H x row tiles, P).

    The maximum is found on the way: a larger one rescales what was added up before by
    2^(old - new) (Milakov and Gimelshein, 2018; Dao and others, 2022).
    """
    i_head = tl.program_id(0) % num_kv_heads
    i_rows = tl.program_id(0) // num_kv_heads
    i_program = tl.program_id(1)
    o_m = i_rows * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_query = o_m // GROUP
    m_d = o_d < HEAD_DIM
    p_k += i_head * kv_head_stride
    p_v += i_head * kv_head_stride

    i_end = tl.load(p_program_items + i_program + 1)
    for i_item in range(tl.load(p_program_items + i_program), i_end):
        i_seq = tl.load(p_items + i_item * _ITEM_FIELDS)
        i_first_tile = tl.load(p_items + i_item * _ITEM_FIELDS + 1)
        num_tiles = tl.load(p_items + i_item * _ITEM_FIELDS + 2)
        context_len = tl.load(p_context_lens + i_seq)
        i_token = tl.load(p_query_starts + i_seq)
        num_queries = tl.load(p_query_starts + i_seq + 1) - i_token
        end = context_len + num_queries
        start = tl.maximum(context_len - window + 1, 0) if WINDOW else 0
        p_table = p_tables + i_seq.to(tl.int64) * table_stride

        m_m = (o_m < ROWS) & (o_query < num_queries)
        o_head = i_head * GROUP + o_m % GROUP
        o_q = (i_token + o_query).to(tl.int64) * q_token_stride + o_head * q_head_stride
        b_q, b_factor = _load_query(
            p_q, o_q[:, None] + o_d[None, :], m_m[:, None] & m_d[None, :], DTYPE
        )
        b_factor *= scale * _LOG2E
        b_position = (context_len + o_query)[:, None]
        b_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

        i_block = _block_of(p_table, i_first_tile, start, end, BLOCK_SIZE, BLOCK_N, WINDOW)
        for i_tile in range(i_first_tile, i_first_tile + num_tiles):
            i_next_block = _block_of(p_table, i_tile + 1, start, end, BLOCK_SIZE, BLOCK_N, WINDOW)
            o_key = i_tile * BLOCK_N + o_n
            m_key = _is_visible(o_key, start, end, WINDOW)
            if BLOCK_SIZE % BLOCK_N == 0:
                o_slot = i_tile % (BLOCK_SIZE // BLOCK_N) * BLOCK_N + o_n
            else:
                o_slot = o_key % BLOCK_SIZE
            o_kv = (i_block * kv_block_stride + o_slot * kv_slot_stride)[:, None] + o_d[None, :]
            m_kv = m_key[:, None] & m_d[None, :]
            b_k = unpack(tl.load(p_k + o_kv, mask=m_kv, other=0), KIND, DTYPE, False)
            b_s = dot(b_q, tl.trans(b_k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)) * b_factor
            if KIND != FLOAT:
                o_scale = (i_block * BLOCK_SIZE + o_slot) * num_kv_heads + i_head
                b_s *= tl.load(p_k_scale + o_scale, mask=m_key, other=0.0)[None, :]
            if SOFTCAP:
                b_s = _soft_cap(b_s, softcap)
            b_s = _hide(b_s, o_key[None, :], b_position, window, WINDOW)

            b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
            # A row that has seen no key yet has no maximum to subtract.
            b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
            b_p = tl.exp2(b_s - b_base[:, None])
            b_rescale = tl.exp2(b_max - b_base)[:, None]
            b_sum = b_sum * b_rescale + b_p
            b_max = b_new_max
            b_v = unpack(tl.load(p_v + o_kv, mask=m_kv, other=0), KIND, DTYPE, True)
            b_acc *= b_rescale
            if KIND == FLOAT:
                b_acc = dot(narrow(b_p, DTYPE), b_v, b_acc)
            else:
                b_scale = tl.load(p_v_scale + o_scale, mask=m_key, other=0.0)
                b_acc = _add_scaled(b_acc, b_p, b_scale, b_v, INVARIANT, DTYPE)
            i_block = i_next_block

        b_total = tl.sum(b_sum, 1)
        m_seen = b_total > 0.0
        b_total = tl.where(m_seen, b_total, 1.0)
        b_lse = tl.where(m_seen, b_max + tl.log2(b_total), -float("inf"))
        o_partial = ((i_item * num_kv_heads + i_head) * ROWS + o_m).to(tl.int64)
        tl.store(p_partial_lse + o_partial, b_lse, mask=m_m)
        tl.store(
            p_partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :],
            b_acc / b_total[:, None],
            mask=m_m[:, None] & m_d[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens", "num_seqs"])
def merge_splits_kernel(
    p_partial_out,
    p_partial_lse,
    p_items,
    p_seq_items,
    p_query_starts,
    p_out,
    p_lse,
    num_tokens,
    num_seqs,
    out_token_stride,
    out_head_stride,
    num_kv_heads,
    num_heads,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out = sum_c w[c] out[c] / sum_c w[c], w = 2^(lse - max lse), over a sequence's items c.

    Grid (S x queries, heads): a program has one query of one sequence, if there are so many, and
    the row of its own number, if that is padding.
    """
    i_row = tl.program_id(0)
    i_head = tl.program_id(1)
    i_seq = i_row // QUERY_LEN
    i_query = i_row % QUERY_LEN
    o_c = tl.arange(0, BLOCK_C)
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < HEAD_DIM
    o_out = i_head * out_head_stride + o_d

    if (i_row < num_tokens) & (i_row >= tl.load(p_query_starts + num_seqs)):
        b_zero = tl.zeros([BLOCK_D], tl.float32)
        tl.store(
            p_out + i_row.to(tl.int64) * out_token_stride + o_out,
            narrow(b_zero, p_out.dtype.element_ty),
            mask=m_d,
        )
        if p_lse is not None:
            tl.store(p_lse + i_row.to(tl.int64) * num_heads + i_head, -float("inf"))

    i_token = tl.load(p_query_starts + i_seq) + i_query
    if i_token < tl.load(p_query_starts + i_seq + 1):
        i_first = tl.load(p_seq_items + i_seq)
        i_end = tl.load(p_seq_items + i_seq + 1)
        i_start = i_first
        if SPLIT_TILES > 0:
            # Items are added up in groups by absolute position: leading ones that see none of this
            # query's keys change no order of addition.
            i_split = tl.load(p_items + i_first * _ITEM_FIELDS + 1) // SPLIT_TILES
            i_start = i_first - i_split % BLOCK_C
        i_partial = (i_head // GROUP) * (QUERY_LEN * GROUP) + i_query * GROUP + i_head % GROUP
        rows = num_kv_heads * (QUERY_LEN * GROUP)
        b_max = -float("inf")
        b_sum = 0.0
        b_acc = tl.zeros([BLOCK_D], tl.float32)
        for i_group in range(i_start, i_end, BLOCK_C):
            o_item = i_group + o_c
            m_item = (o_item >= i_first) & (o_item < i_end)
            o_partial = o_item.to(tl.int64) * rows + i_partial
            b_lse = tl.load(p_partial_lse + o_partial, mask=m_item, other=-float("inf"))
            b_out = tl.load(
                p_partial_out + o_partial[:, None] * HEAD_DIM + o_d[None, :],
                mask=m_item[:, None] & m_d[None, :],
                other=0.0,
            )
            b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
            b_base = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
            b_weight = tl.exp2(b_lse - b_base)
            b_rescale = tl.exp2(b_max - b_base)
            b_sum = b_sum * b_rescale + tl.sum(b_weight, 0)
            b_acc = b_acc * b_rescale + tl.sum(b_out * b_weight[:, None], 0)
            b_max = b_new_max
        b_out = narrow(b_acc / b_sum, p_out.dtype.element_ty)
        tl.store(p_out + i_token.to(tl.int64) * out_token_stride + o_out, b_out, mask=m_d)
        if p_lse is not None:
            p_row = p_lse + i_token.to(tl.int64) * num_heads + i_head
            tl.store(p_row, (b_max + tl.log2(b_sum)) * _LN2)
