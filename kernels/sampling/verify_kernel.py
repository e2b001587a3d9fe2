"""Verification of drafts: which are kept, and the token that follows them.

One race per sequence, in the one row where its drafts end. Sequence q's rows are
``offsets[q] .. offsets[q + 1]``, the last of them its bonus row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.noise_kernel import (
    ACCEPT_DOMAIN,
    RESIDUAL_DOMAIN,
    SAMPLE_DOMAIN,
    neg_log_exponential,
    philox4x32,
    words_of_ids,
)
from kvferry.kernels.sampling.row_kernel import (
    NEG_INF,
    NO_ID,
    best_of_splits,
    load_checked,
    load_temperature,
    mass_of,
    row_top,
)
from kvferry.kernels.sampling.tensors import MAX_DRAFTS as _MAX_DRAFTS

MAX_DRAFTS = tl.constexpr(_MAX_DRAFTS)
COLUMNS = tl.constexpr(_MAX_DRAFTS + 1)
LEAST_NORMAL = tl.constexpr(2.0**-126)
"""Of float32: below, what is left of p - q is nothing, whether or not a chip keeps such numbers."""


@triton.jit
def kept_drafts(p_accept, p_offsets, i_seq):
    """First row of a sequence, how many of its drafts are kept, and how many it has."""
    start, end = tl.load(p_offsets + i_seq), tl.load(p_offsets + i_seq + 1)
    num_drafts = tl.minimum(end - start - 1, MAX_DRAFTS)
    o_d = tl.arange(0, COLUMNS)
    b_accept = tl.load(p_accept + start + o_d, mask=o_d < num_drafts, other=0)
    return start.to(tl.int64), tl.min(tl.where(b_accept != 0, COLUMNS, o_d), axis=0), num_drafts


@triton.jit
def store_tokens(p_draft, p_token, start, kept, token, i_seq):
    """The kept drafts, the token after them, then zeros."""
    o_d = tl.arange(0, COLUMNS)
    b_draft = tl.load(p_draft + start + o_d, mask=o_d < kept, other=0)
    b_token = tl.where(o_d == kept, token.to(tl.int64), b_draft)
    tl.store(p_token + i_seq * COLUMNS + o_d, b_token)


@triton.jit
def match_kernel(p_sampled, p_bad, p_draft, p_offsets, p_num_kept, p_token, p_invalid):
    """Coupled: drafts are kept as long as they are what was sampled in their row."""
    i_seq = tl.program_id(0).to(tl.int64)
    start, end = tl.load(p_offsets + i_seq).to(tl.int64), tl.load(p_offsets + i_seq + 1)
    num_drafts = tl.minimum(end - start - 1, MAX_DRAFTS)
    o_d = tl.arange(0, COLUMNS)
    m_d = o_d < num_drafts
    b_draft = tl.load(p_draft + start + o_d, mask=m_d, other=0)
    b_sampled = tl.load(p_sampled + start + o_d, mask=m_d, other=0)
    b_bad = tl.load(p_bad + start + o_d, mask=m_d, other=1).to(tl.int32)
    m_keep = m_d & (b_draft == b_sampled) & (b_bad == 0)
    kept = tl.min(tl.where(m_keep, COLUMNS, o_d), axis=0)
    tl.store(p_num_kept + i_seq, kept)
    tl.store(p_invalid + i_seq, tl.load(p_bad + start + kept))
    store_tokens(p_draft, p_token, start, kept, tl.load(p_sampled + start + kept), i_seq)


@triton.jit
def target_kernel(
    p_logits,
    p_temperature,
    p_threshold,
    p_top,
    p_mass,
    p_best_id,
    p_bad,
    stride,
    vocab_size,
    num_splits,
    FILTERED: tl.constexpr,
    EDITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each split: largest logit, lowest id that has it, mass of its survivors, whether bad."""
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = load_temperature(p_temperature, i_row)
    o_v, b_l, bad = load_checked(p_logits, i_row, i_split, stride, vocab_size, EDITED, BLOCK)
    top = tl.max(b_l, axis=0)
    b_mass = mass_of(b_l, top, temperature)
    if FILTERED:
        b_mass = tl.where(b_l >= tl.load(p_threshold + i_row), b_mass, 0.0)
    i_out = i_row * num_splits + i_split
    tl.store(p_top + i_out, top)
    tl.store(p_best_id + i_out, tl.min(tl.where(b_l == top, o_v, NO_ID), axis=0))
    tl.store(p_mass + i_out, tl.sum(b_mass, axis=0))
    tl.store(p_bad + i_out, bad)


@triton.jit
def accept_kernel(
    p_logits,
    p_temperature,
    p_seed,
    p_sample_index,
    p_position,
    p_threshold,
    p_top,
    p_mass,
    p_best_id,
    p_bad,
    p_draft,
    p_probs,
    p_accept,
    p_likeliest,
    stride,
    vocab_size,
    num_splits,
    FILTERED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """accept = u * q(draft) < p(draft), per row, 0 in rows that are bad; and argmax p."""
    i_row = tl.program_id(0).to(tl.int64)
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    top, mass = row_top(p_top, p_mass, i_row, num_splits, temperature, SPLITS)
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < num_splits
    bad = tl.max(tl.load(p_bad + i_row * num_splits + o_s, mask=m_s, other=0), axis=0)
    b_top = tl.load(p_top + i_row * num_splits + o_s, mask=m_s, other=NEG_INF)
    b_best = tl.load(p_best_id + i_row * num_splits + o_s, mask=m_s, other=NO_ID)
    best = tl.min(tl.where(b_top == top, b_best, NO_ID), axis=0)
    draft = tl.load(p_draft + i_row)
    m_draft = (draft >= 0) & (draft < vocab_size)
    logit = tl.load(p_logits + i_row * stride + draft, mask=m_draft, other=NEG_INF).to(tl.float32)
    p = mass_of(logit, top, temperature) / tl.maximum(mass, 1e-30)
    if FILTERED:
        p = tl.where(logit >= tl.load(p_threshold + i_row), p, 0.0)
    p = tl.where(is_greedy, tl.where(draft == best, 1.0, 0.0), p)
    q = 1.0
    if HAS_PROBS:
        q = tl.load(p_probs + i_row * vocab_size + draft, mask=m_draft, other=1.0)
    word, _, _, _ = philox4x32(
        (i_row * 0).to(tl.int32),
        tl.load(p_position + i_row),
        tl.load(p_sample_index + i_row),
        tl.load(p_seed + i_row),
        ACCEPT_DOMAIN,
    )
    # 24 bits are exact in float32, and less than 1.
    uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
    accept = (uniform * q < p) & (bad == 0) & m_draft
    tl.store(p_accept + i_row, accept.to(tl.int32))
    tl.store(p_likeliest + i_row, best)


@triton.jit
def replace_kernel(
    p_logits,
    p_temperature,
    p_seed,
    p_sample_index,
    p_position,
    p_threshold,
    p_row_top,
    p_row_mass,
    p_accept,
    p_offsets,
    p_draft,
    p_probs,
    p_score,
    p_id,
    p_top,
    p_bad,
    stride,
    vocab_size,
    num_splits,
    FILTERED: tl.constexpr,
    EDITED: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The race of a sequence: over p in its bonus row, else over max(p - q, 0) in the row of the
    first draft that is not kept. Leaves what ``race_kernel`` leaves.
    """
    i_seq, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, kept, num_drafts = kept_drafts(p_accept, p_offsets, i_seq)
    i_row = start + kept
    is_bonus = kept == num_drafts
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    o_v, b_l, bad = load_checked(p_logits, i_row, i_split, stride, vocab_size, EDITED, BLOCK)
    top = tl.max(b_l, axis=0)
    m_in = b_l > NEG_INF
    threshold = NEG_INF
    if FILTERED:
        threshold = tl.load(p_threshold + i_row)
        m_in = m_in & (b_l >= threshold)
    b_score, scale = b_l, top
    if (is_greedy == 0) & (top >= threshold) & (top > NEG_INF):
        b_score = (b_l - top) / temperature
        if is_bonus == 0:
            if HAS_PROBS:
                scale, mass = row_top(p_row_top, p_row_mass, i_row, num_splits, temperature, SPLITS)
                p_q = p_probs + i_row * vocab_size + o_v
                b_q = tl.load(p_q, mask=o_v < vocab_size, other=0.0)
                b_rest = mass_of(b_l, scale, temperature) / mass - b_q
                m_in = m_in & (b_rest >= LEAST_NORMAL)
                b_score = tl.log(tl.where(b_rest >= LEAST_NORMAL, b_rest, 1.0))
            else:
                m_in = m_in & (o_v != tl.load(p_draft + i_row))
        b_words = words_of_ids(
            i_split * BLOCK,
            tl.load(p_position + i_row),
            tl.load(p_sample_index + i_row),
            tl.load(p_seed + i_row),
            tl.where(is_bonus, SAMPLE_DOMAIN, RESIDUAL_DOMAIN),
            BLOCK,
        )
        b_score += neg_log_exponential(b_words)
    b_score = tl.where(m_in, b_score, NEG_INF)
    best = tl.max(b_score, axis=0)
    i_out = i_seq * num_splits + i_split
    tl.store(p_score + i_out, best)
    tl.store(p_id + i_out, tl.min(tl.where(b_score == best, o_v, NO_ID), axis=0))
    # Scores of a residual are relative to the whole row already.
    tl.store(p_top + i_out, scale)
    tl.store(p_bad + i_out, bad)


@triton.jit
def finish_kernel(
    p_temperature,
    p_score,
    p_id,
    p_top,
    p_bad,
    p_accept,
    p_likeliest,
    p_offsets,
    p_draft,
    p_num_kept,
    p_token,
    p_invalid,
    num_splits,
    SPLITS: tl.constexpr,
):
    """Tokens, number of drafts kept and validity of each sequence."""
    i_seq = tl.program_id(0).to(tl.int64)
    start, kept, num_drafts = kept_drafts(p_accept, p_offsets, i_seq)
    temperature, is_greedy = load_temperature(p_temperature, start + kept)
    token, bad, best = best_of_splits(
        p_score, p_id, p_top, p_bad, i_seq, num_splits, temperature, is_greedy, SPLITS
    )
    if (kept < num_drafts) & (best == NEG_INF) & (bad == 0):
        # p = q up to rounding, so that nothing is left to draw from.
        token = tl.load(p_likeliest + start + kept)
    tl.store(p_num_kept + i_seq, kept)
    tl.store(p_invalid + i_seq, bad)
    store_tokens(p_draft, p_token, start, kept, token, i_seq)
