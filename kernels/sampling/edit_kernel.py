"""Edits of logits, and the token counts that penalties read."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.row_kernel import NEG_INF, POS_INF
from kvferry.kernels.sampling.tensors import IN_PROMPT as _IN_PROMPT

IN_PROMPT = tl.constexpr(_IN_PROMPT)
NAN = tl.constexpr(float("nan"))


# As many tokens as a step has: no binary of its own for one, or for a multiple of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def add_tokens_kernel(
    p_counts,
    p_slot,
    p_token,
    num_tokens,
    num_slots,
    vocab_size,
    PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[slot, token] += 1, or PROMPT: |= IN_PROMPT. Integers: no order of sums matters."""
    o_t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_t = o_t < num_tokens
    b_slot = tl.load(p_slot + o_t, mask=m_t, other=-1).to(tl.int64)
    b_token = tl.load(p_token + o_t, mask=m_t, other=-1)
    m_t = (b_slot >= 0) & (b_slot < num_slots) & (b_token >= 0) & (b_token < vocab_size)
    p_entry = p_counts + b_slot * vocab_size + b_token
    if PROMPT:
        tl.atomic_or(p_entry, tl.full((BLOCK,), IN_PROMPT, tl.int32), mask=m_t)
    else:
        tl.atomic_add(p_entry, tl.full((BLOCK,), 1, tl.int32), mask=m_t)


@triton.jit
def edit_kernel(
    p_logits,
    p_counts,
    p_slot,
    p_repetition,
    p_frequency,
    p_presence,
    p_bits,
    p_out,
    stride,
    vocab_size,
    num_words,
    PENALTIES: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x / r if x > 0, else x * r, of ids seen; x - (f * count + p) of ids in the output; -inf where
    the grammar's bit is 0. NaN stays where x was not finite.
    """
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v = i_split * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < vocab_size
    b_x = tl.load(p_logits + i_row * stride + o_v, mask=m_v, other=0.0).to(tl.float32)
    m_finite = (b_x > NEG_INF) & (b_x < POS_INF)
    b_x = tl.where(m_finite, b_x, 0.0)
    if PENALTIES:
        slot = tl.load(p_slot + i_row).to(tl.int64)
        if slot >= 0:
            b_packed = tl.load(p_counts + slot * vocab_size + o_v, mask=m_v, other=0)
            b_count = b_packed & 0x7FFFFFFF
            repetition = tl.load(p_repetition + i_row)
            b_scaled = tl.where(b_x > 0, tl.div_rn(b_x, repetition), b_x * repetition)
            b_x = tl.where(b_packed != 0, b_scaled, b_x)
            b_less = tl.load(p_frequency + i_row) * b_count.to(tl.float32)
            b_less += tl.load(p_presence + i_row)
            b_x = tl.where(b_count > 0, b_x - b_less, b_x)
    if BITS:
        b_word = tl.load(p_bits + i_row * num_words + o_v // 32, mask=m_v, other=0)
        b_x = tl.where(((b_word >> (o_v % 32)) & 1) == 0, NEG_INF, b_x)
    tl.store(p_out + i_row * vocab_size + o_v, tl.where(m_finite, b_x, NAN), mask=m_v)


@triton.jit
def scatter_kernel(
    p_out, p_ids, p_values, p_offsets, vocab_size, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """Add values to the ids that a row names, or (not ADD) make them -inf; NaN stays."""
    i_row = tl.program_id(0).to(tl.int64)
    start, last = tl.load(p_offsets + i_row), tl.load(p_offsets + i_row + 1)
    while start < last:
        o_i = start + tl.arange(0, BLOCK)
        m_i = o_i < last
        b_id = tl.load(p_ids + o_i, mask=m_i, other=-1)
        m_i = (b_id >= 0) & (b_id < vocab_size)
        p_x = p_out + i_row * vocab_size + b_id
        b_x = tl.load(p_x, mask=m_i, other=0.0)
        if ADD:
            b_x += tl.load(p_values + o_i, mask=m_i, other=0.0)
        else:
            b_x = tl.where(b_x == b_x, NEG_INF, b_x)
        tl.store(p_x, b_x, mask=m_i)
        start += BLOCK
