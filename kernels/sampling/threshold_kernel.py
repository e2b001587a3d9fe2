"""The threshold of top-k, top-p and min-p without a sort: one logit per row.

Thresholds are logits, not logits / temperature: no two logits can fall together then. Mass is
exp((logit - largest) / temperature). Tensors of partial results are [R, splits]. (Pivots instead of
a sort: Ye et al., FlashInfer, arXiv 2501.01005. There they are part of the draw, which may be
repeated; here the noise of an id is given, so that they have to find the threshold itself.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.row_kernel import (
    NEG_INF,
    POS_INF,
    load_split,
    load_temperature,
    mass_of,
    row_top,
)

NUM_PIVOTS = tl.constexpr(8)
# Floats per row that gather_kernel leaves: lower and upper end of the bracket, count and mass from
# upper on, largest logit, mass of the row; two are unused.
ROW_FACTS = tl.constexpr(8)


@triton.jit
def scan_kernel(
    p_logits, p_temperature, p_top, p_mass, stride, vocab_size, num_splits, BLOCK: tl.constexpr
):
    """Largest logit of each split, and mass relative to it."""
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = load_temperature(p_temperature, i_row)
    _, b_l = load_split(p_logits, i_row, i_split, stride, vocab_size, BLOCK)
    top = tl.max(b_l, axis=0)
    tl.store(p_top + i_row * num_splits + i_split, top)
    mass = tl.sum(mass_of(b_l, top, temperature), axis=0)
    tl.store(p_mass + i_row * num_splits + i_split, mass)


@triton.jit
def bracket_kernel(
    p_logits,
    p_temperature,
    p_top,
    p_mass,
    p_pivot,
    p_above,
    stride,
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pivots [R, NUM_PIVOTS] and, in ``p_above`` [R, splits, 2, NUM_PIVOTS], count and mass of the
    logits of each split that are at least as large.
    """
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, _ = load_temperature(p_temperature, i_row)
    top, _ = row_top(p_top, p_mass, i_row, num_splits, temperature, SPLITS)
    _, b_l = load_split(p_logits, i_row, i_split, stride, vocab_size, BLOCK)
    b_mass = mass_of(b_l, top, temperature)
    p_out = p_above + (i_row * num_splits + i_split) * 2 * NUM_PIVOTS
    safe_top = tl.where(top > NEG_INF, top, 0.0)
    for j in tl.static_range(NUM_PIVOTS):
        # 0.5, 1.5, 3, 5, ... nats below the largest. Stored: others must compare with these bits.
        pivot = safe_top - temperature * ((j + 1) * (j + 2) / 4)
        m_above = b_l >= pivot
        tl.store(p_out + j, tl.sum(m_above.to(tl.float32), axis=0))
        tl.store(p_out + NUM_PIVOTS + j, tl.sum(tl.where(m_above, b_mass, 0.0), axis=0))
        if i_split == 0:
            tl.store(p_pivot + i_row * NUM_PIVOTS + j, pivot)


@triton.jit
def gather_kernel(
    p_logits,
    p_temperature,
    p_top_k,
    p_top_p,
    p_top,
    p_mass,
    p_pivot,
    p_above,
    p_found,
    p_num_found,
    p_facts,
    stride,
    vocab_size,
    num_splits,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The bracket [lower, upper) of a row's threshold, and the logits in it: ``p_found``
    [R, splits, BLOCK], the first ``p_num_found`` of each split.

    Everything from upper on survives: fewer than k ids are above it, or less mass than top-p wants,
    even of what is certain to be within top-k.
    """
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    top, total = row_top(p_top, p_mass, i_row, num_splits, temperature, SPLITS)
    top_k, top_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row)
    has_k, has_p = top_k > 0, top_p < 1.0
    o_j, o_s = tl.arange(0, NUM_PIVOTS), tl.arange(0, SPLITS)
    p_part = p_above + (i_row * num_splits + o_s[:, None]) * 2 * NUM_PIVOTS + o_j[None, :]
    m_s = o_s[:, None] < num_splits
    b_count = tl.sum(tl.load(p_part, mask=m_s, other=0.0), axis=0)
    b_above = tl.sum(tl.load(p_part + NUM_PIVOTS, mask=m_s, other=0.0), axis=0)
    b_pivot = tl.load(p_pivot + i_row * NUM_PIVOTS + o_j)

    m_few = b_count < top_k.to(tl.float32)
    certain = tl.max(tl.where(m_few, b_above, 0.0), axis=0)
    wanted = tl.where(has_p, top_p * tl.where(has_k, certain, total), POS_INF)
    m_upper = (m_few | (top_k <= 0)) & (b_above < wanted)
    m_lower = tl.where(has_k, m_few == 0, b_above >= top_p * total)
    lower = tl.max(tl.where(m_lower, b_pivot, NEG_INF), axis=0)
    upper = tl.min(tl.where(m_upper, b_pivot, POS_INF), axis=0)
    searched = (has_k | has_p) & (is_greedy == 0)
    lower = tl.where(searched, lower, POS_INF)
    upper = tl.where(searched, upper, POS_INF)

    _, b_l = load_split(p_logits, i_row, i_split, stride, vocab_size, BLOCK)
    m_in = (b_l >= lower) & (b_l < upper) & (b_l > NEG_INF)
    b_place = tl.cumsum(m_in.to(tl.int32), axis=0) - 1
    tl.store(p_found + (i_row * num_splits + i_split) * BLOCK + b_place, b_l, mask=m_in)
    tl.store(p_num_found + i_row * num_splits + i_split, tl.sum(m_in.to(tl.int32), axis=0))
    if i_split == 0:
        p_row = p_facts + i_row * ROW_FACTS
        tl.store(p_row, lower)
        tl.store(p_row + 1, upper)
        tl.store(p_row + 2, tl.max(tl.where(m_upper, b_count, 0.0), axis=0))
        tl.store(p_row + 3, tl.max(tl.where(m_upper, b_above, 0.0), axis=0))
        tl.store(p_row + 4, top)
        tl.store(p_row + 5, total)


@triton.jit
def ordered_bits(value):
    """A float32 as an int64 that compares as the float does."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def from_ordered_bits(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def found_above(
    p_found,
    i_row,
    num_splits,
    value1,
    value2,
    value3,
    b_num,
    top,
    temperature,
    MASS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count, or MASS, of the compacted logits from each of three values on."""
    o_s, o_w = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    p_split = p_found + (i_row * num_splits + o_s[:, None]) * BLOCK
    b_sum1 = tl.zeros((SPLITS, WIDTH), dtype=tl.float32)
    b_sum2 = tl.zeros((SPLITS, WIDTH), dtype=tl.float32)
    b_sum3 = tl.zeros((SPLITS, WIDTH), dtype=tl.float32)
    start, most = 0, tl.max(b_num, axis=0)
    while start < most:
        m_w = (start + o_w)[None, :] < b_num[:, None]
        b_l = tl.load(p_split + (start + o_w)[None, :], mask=m_w, other=NEG_INF)
        b_weight = mass_of(b_l, top, temperature) if MASS else m_w.to(tl.float32)
        b_sum1 += tl.where(b_l >= value1, b_weight, 0.0)
        b_sum2 += tl.where(b_l >= value2, b_weight, 0.0)
        b_sum3 += tl.where(b_l >= value3, b_weight, 0.0)
        start += WIDTH
    return tl.sum(b_sum1), tl.sum(b_sum2), tl.sum(b_sum3)


@triton.jit
def largest_with(
    p_found,
    i_row,
    num_splits,
    lower,
    upper,
    base,
    target,
    b_num,
    top,
    temperature,
    MASS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest float32 in [lower, upper) from which on there are ``target`` ids or mass; lower
    if none. ``base`` of it is from upper on. Two bits of the answer per round.
    """
    low, high = ordered_bits(lower), ordered_bits(upper)
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        try1 = low + step
        try2 = tl.minimum(low + 2 * step, high - 1)
        try3 = tl.minimum(low + 3 * step, high - 1)
        sum1, sum2, sum3 = found_above(
            p_found,
            i_row,
            num_splits,
            from_ordered_bits(try1),
            from_ordered_bits(try2),
            from_ordered_bits(try3),
            b_num,
            top,
            temperature,
            MASS,
            SPLITS,
            WIDTH,
            BLOCK,
        )
        holds1, holds2, holds3 = base + sum1 >= target, base + sum2 >= target, base + sum3 >= target
        high = tl.where(holds1, tl.where(holds2, tl.where(holds3, high, try3), try2), try1)
        low = tl.where(holds3, try3, tl.where(holds2, try2, tl.where(holds1, try1, low)))
    return from_ordered_bits(low)


@triton.jit
def search_kernel(
    p_temperature,
    p_top_k,
    p_top_p,
    p_min_p,
    p_found,
    p_num_found,
    p_facts,
    p_threshold,
    num_splits,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logit from which on ids survive, [R]; -inf where all do."""
    i_row = tl.program_id(0).to(tl.int64)
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    top_k, top_p = tl.load(p_top_k + i_row), tl.load(p_top_p + i_row)
    min_p = tl.load(p_min_p + i_row)
    p_row = p_facts + i_row * ROW_FACTS
    lower, upper = tl.load(p_row), tl.load(p_row + 1)
    base_count, base_mass = tl.load(p_row + 2), tl.load(p_row + 3)
    top, norm = tl.load(p_row + 4), tl.load(p_row + 5)
    o_s = tl.arange(0, SPLITS)
    b_num = tl.load(p_num_found + i_row * num_splits + o_s, mask=o_s < num_splits, other=0)

    threshold = NEG_INF
    if is_greedy == 0:
        if top_k > 0:
            threshold = largest_with(
                p_found,
                i_row,
                num_splits,
                lower,
                upper,
                base_count,
                top_k.to(tl.float32),
                b_num,
                top,
                temperature,
                False,
                SPLITS,
                WIDTH,
                BLOCK,
            )
            lower = threshold
        if top_p < 1.0:
            if top_k > 0:
                norm, _, _ = found_above(
                    p_found,
                    i_row,
                    num_splits,
                    lower,
                    lower,
                    lower,
                    b_num,
                    top,
                    temperature,
                    True,
                    SPLITS,
                    WIDTH,
                    BLOCK,
                )
                norm += base_mass
            threshold = largest_with(
                p_found,
                i_row,
                num_splits,
                lower,
                upper,
                base_mass,
                top_p * norm,
                b_num,
                top,
                temperature,
                True,
                SPLITS,
                WIDTH,
                BLOCK,
            )
        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + temperature * tl.log(min_p))
    tl.store(p_threshold + i_row, threshold)
