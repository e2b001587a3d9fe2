"""Gather and scatter in one pass: each program moves a run of tokens of one row, digest on the way.

Shapes and the digest's formula are those of ``slab`` and ``digest``. Programs: (run of tokens
within a tile, row). They add to the totals: sums commute, so the programs of a tile need no order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.kv_pack.digest_kernel import (
    add_totals,
    column_keys,
    find_slots,
    keys,
    tokens_of_program,
)
from kvferry.kernels.language import FLOAT, cache_from, cache_to, quantisation_scale


@triton.jit
def move_words(
    p_cache,
    p_slab,
    b_slot,
    b_token,
    b_key,
    m_t,
    m_fresh,
    SLOT_WORDS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Move words [T, TOKEN_WORDS] as they are; the sum of word * key(token) * key(column)."""
    p_cache_t = p_cache + (b_slot * SLOT_WORDS)[:, None]
    p_slab_t = p_slab + (b_token * TOKEN_WORDS)[:, None]
    b_sum = tl.zeros([BLOCK_W], tl.uint64)
    for i_w in tl.range(0, TOKEN_WORDS, BLOCK_W):
        o_w = i_w + tl.arange(0, BLOCK_W)
        m_w = (o_w < TOKEN_WORDS)[None, :]
        if GATHER:
            b_word = tl.load(p_cache_t + o_w[None, :], mask=m_fresh[:, None] & m_w, other=0)
            tl.store(p_slab_t + o_w[None, :], b_word, mask=m_t[:, None] & m_w)
        else:
            b_word = tl.load(p_slab_t + o_w[None, :], mask=m_t[:, None] & m_w, other=0)
            tl.store(p_cache_t + o_w[None, :], b_word, mask=m_fresh[:, None] & m_w)
        # Over tokens first: a thread holds several tokens of its columns.
        b_wide = b_word.to(tl.uint32, bitcast=True).to(tl.uint64)
        b_sum += tl.sum(b_wide * b_key[:, None], axis=0) * column_keys(FIRST_COLUMN + o_w)
    return tl.sum(b_sum, axis=0)


# Ranges differ from transfer to transfer, and are no part of the code: the few kernels of a cache
# and a wire type are compiled once.
_RANGE = [
    "begin",
    "num_tokens",
    "rows_per_tile",
    "tokens_per_tile",
    "runs_per_tile",
    "tiles_per_row",
]


@triton.jit(do_not_specialize=_RANGE)
def move_kernel(
    p_cache,
    p_cache_scale,
    p_slab,
    p_slab_scale,
    p_blocks,
    p_live,
    p_leased,
    p_totals,
    begin,
    num_tokens,
    num_slots,
    rows_per_tile,
    tokens_per_tile,
    runs_per_tile,
    tiles_per_row,
    BLOCK_SIZE: tl.constexpr,
    CHECK: tl.constexpr,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Cache and slab of one type: 32-bit words, and after them the scales as words. The pointers
    to the cache stand at the first layer and head of the range.
    """
    i_row, i_part, o_t, m_t = tokens_of_program(num_tokens, tokens_per_tile, runs_per_tile, BLOCK_T)
    b_slot, m_fresh = find_slots(
        p_blocks, p_live, p_leased, begin + o_t, m_t, num_slots, BLOCK_SIZE, CHECK
    )
    b_slot += i_row * num_slots
    b_token = i_row * num_tokens + o_t
    b_key = tl.where(m_t, keys(b_token), 0)
    b_sum = tl.sum(b_key, axis=0) + move_words(
        p_cache,
        p_slab,
        b_slot,
        b_token,
        b_key,
        m_t,
        m_fresh,
        CACHE_HEADS * HEAD_WORDS,
        HEADS * HEAD_WORDS,
        0,
        GATHER,
        BLOCK_W,
    )
    if SCALED:
        b_sum += move_words(
            p_cache_scale,
            p_slab_scale,
            b_slot,
            b_token,
            b_key,
            m_t,
            m_fresh,
            CACHE_HEADS,
            HEADS,
            HEADS * HEAD_WORDS,
            GATHER,
            BLOCK_H,
        )
    add_totals(p_totals, b_sum, m_t, m_fresh, i_row, i_part, rows_per_tile, tiles_per_row)


@triton.jit
def element_words(b_x, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Elements [T, D] of a slab -> its 32-bit words [T, D * itemsize / 4], as uint64."""
    BITS: tl.constexpr = b_x.dtype.primitive_bitwidth
    PER_WORD: tl.constexpr = 32 // BITS
    if PER_WORD == 1:
        return b_x.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        b_bits = b_x.to(tl.uint16 if BITS == 16 else tl.uint8, bitcast=True).to(tl.uint32)
        b_parts = tl.reshape(b_bits, [BLOCK_T, BLOCK_D // PER_WORD, PER_WORD])
        o_bit = BITS * tl.arange(0, PER_WORD).to(tl.uint32)
        return tl.sum(b_parts << o_bit[None, None, :], axis=2).to(tl.uint64)


@triton.jit
def convert_head(
    p_from,
    p_from_scale,
    o_from,
    m_from,
    p_to,
    p_to_scale,
    o_to,
    m_to,
    FROM_KIND: tl.constexpr,
    TO_KIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Move one head of some tokens, at int64 offsets in heads: elements [T, D] and scales [T], as
    read and as written. What is masked is 0; the scales of a float type mean nothing.
    """
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_d = o_d < HEAD_DIM
    p_from = p_from + (o_from * HEAD_DIM)[:, None] + o_d
    b_from = tl.load(p_from, mask=m_from[:, None] & m_d, other=0)
    b_x = cache_to(b_from, FROM_KIND, tl.float32)
    b_from_scale = tl.zeros([b_from.shape[0]], tl.float32)
    if FROM_KIND != FLOAT:
        b_from_scale = tl.load(p_from_scale + o_from, mask=m_from, other=0.0)
        b_x = b_x * b_from_scale[:, None]
    b_to_scale = b_from_scale
    if TO_KIND != FLOAT:
        b_to_scale, b_inverse = quantisation_scale(tl.max(tl.abs(b_x), axis=1), TO_KIND)
        b_x = b_x * b_inverse[:, None]
        tl.store(p_to_scale + o_to, b_to_scale, mask=m_to)
    b_to = cache_from(b_x, TO_KIND, p_to.dtype.element_ty)
    tl.store(p_to + (o_to * HEAD_DIM)[:, None] + o_d, b_to, mask=m_to[:, None] & m_d)
    return b_from, b_from_scale, b_to, b_to_scale


@triton.jit(do_not_specialize=_RANGE)
def convert_kernel(
    p_cache,
    p_cache_scale,
    p_slab,
    p_slab_scale,
    p_blocks,
    p_live,
    p_leased,
    p_totals,
    begin,
    num_tokens,
    num_slots,
    rows_per_tile,
    tokens_per_tile,
    runs_per_tile,
    tiles_per_row,
    BLOCK_SIZE: tl.constexpr,
    CHECK: tl.constexpr,
    GATHER: tl.constexpr,
    CACHE_KIND: tl.constexpr,
    SLAB_KIND: tl.constexpr,
    CACHE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Cache and slab of two types: value = element * scale in float32, quantised anew where the
    other type asks for it; one head after another. HEAD_WORDS are the slab's, as is the digest.
    """
    i_row, i_part, o_t, m_t = tokens_of_program(num_tokens, tokens_per_tile, runs_per_tile, BLOCK_T)
    b_slot, m_fresh = find_slots(
        p_blocks, p_live, p_leased, begin + o_t, m_t, num_slots, BLOCK_SIZE, CHECK
    )
    b_token = i_row * num_tokens + o_t
    b_key = tl.where(m_t, keys(b_token), 0)
    o_cache, o_slab = (b_slot + i_row * num_slots) * CACHE_HEADS, b_token * HEADS
    o_w, o_zero = tl.arange(0, BLOCK_W), tl.zeros([BLOCK_T], tl.int32)
    # Partial sums of a token: words that one thread holds, so that no head ends in an exchange.
    GROUP: tl.constexpr = min(BLOCK_W, 4)
    b_sum = tl.zeros([BLOCK_T, BLOCK_W // GROUP], tl.uint64)
    b_scale_sum = tl.full([BLOCK_T], 1, tl.uint64)
    for i_h in tl.range(0, HEADS):
        if GATHER:
            _, _, b_slab, b_scale = convert_head(
                p_cache,
                p_cache_scale,
                o_cache + i_h,
                m_fresh,
                p_slab,
                p_slab_scale,
                o_slab + i_h,
                m_t,
                CACHE_KIND,
                SLAB_KIND,
                HEAD_DIM,
                BLOCK_D,
            )
        else:
            b_slab, b_scale, _, _ = convert_head(
                p_slab,
                p_slab_scale,
                o_slab + i_h,
                m_t,
                p_cache,
                p_cache_scale,
                o_cache + i_h,
                m_fresh,
                SLAB_KIND,
                CACHE_KIND,
                HEAD_DIM,
                BLOCK_D,
            )
        b_words = element_words(b_slab, BLOCK_T, BLOCK_D)
        b_weighted = b_words * column_keys(i_h * HEAD_WORDS + o_w)[None, :]
        b_sum += tl.sum(tl.reshape(b_weighted, [BLOCK_T, BLOCK_W // GROUP, GROUP]), axis=2)
        if SLAB_KIND != FLOAT:
            b_bits = b_scale.to(tl.uint32, bitcast=True).to(tl.uint64)
            b_scale_sum += b_bits * column_keys(HEADS * HEAD_WORDS + i_h + o_zero)
    b_total = tl.sum((tl.sum(b_sum, axis=1) + b_scale_sum) * b_key, axis=0)
    add_totals(p_totals, b_total, m_t, m_fresh, i_row, i_part, rows_per_tile, tiles_per_row)
