"""Sampling of one token per row without a sort, in passes over a row that is split among programs.

NOTE on the algorithm. Each program holds BLOCK logits of one row in registers. ``scan`` leaves the
largest logit and the mass of every split; ``bracket`` counts ids and mass above a few pivots below
the row's largest logit; ``gather`` picks the two pivots that the row's threshold must lie between
and compacts the logits between them; ``search``, one program per row, bisects their ordered bits
until the threshold is exact; ``race`` draws among the ids from the threshold on; ``merge`` takes
the best of the splits. Sums have a fixed order, so that a row's token has the same bits whatever
the other rows are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.noise_kernel import (
    SAMPLE_DOMAIN,
    neg_log_exponential,
    words_of_ids,
)
from kvferry.kernels.sampling.row_kernel import (
    NEG_INF,
    NO_ID,
    best_of_splits,
    load_checked,
    load_temperature,
)


@triton.jit
def race_kernel(
    p_logits,
    p_temperature,
    p_seed,
    p_sample_index,
    p_position,
    p_threshold,
    p_score,
    p_id,
    p_top,
    p_bad,
    stride,
    vocab_size,
    num_splits,
    FILTERED: tl.constexpr,
    EDITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Best score of each split and the lowest id that has it; the split's largest logit, which
    scores are relative to so that ties at the top stay exact at low temperatures; whether any of
    its logits was not finite (EDITED: -inf is allowed).
    """
    i_row, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_v, b_l, bad = load_checked(p_logits, i_row, i_split, stride, vocab_size, EDITED, BLOCK)
    top = tl.max(b_l, axis=0)
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    threshold = NEG_INF
    if FILTERED:
        threshold = tl.load(p_threshold + i_row)
    b_score = b_l
    # Most splits of a filtered row have no survivor, and need no noise.
    if (is_greedy == 0) & (top >= threshold) & (top > NEG_INF):
        b_words = words_of_ids(
            i_split * BLOCK,
            tl.load(p_position + i_row),
            tl.load(p_sample_index + i_row),
            tl.load(p_seed + i_row),
            SAMPLE_DOMAIN,
            BLOCK,
        )
        b_score = (b_l - top) / temperature + neg_log_exponential(b_words)
    b_score = tl.where((b_l >= threshold) & (b_l > NEG_INF), b_score, NEG_INF)
    best = tl.max(b_score, axis=0)
    i_out = i_row * num_splits + i_split
    tl.store(p_score + i_out, best)
    tl.store(p_id + i_out, tl.min(tl.where(b_score == best, o_v, NO_ID), axis=0))
    tl.store(p_top + i_out, top)
    tl.store(p_bad + i_out, bad)


@triton.jit
def merge_kernel(
    p_temperature, p_score, p_id, p_top, p_bad, p_token, p_invalid, num_splits, SPLITS: tl.constexpr
):
    """Token and validity of each row."""
    i_row = tl.program_id(0).to(tl.int64)
    temperature, is_greedy = load_temperature(p_temperature, i_row)
    token, bad, _ = best_of_splits(
        p_score, p_id, p_top, p_bad, i_row, num_splits, temperature, is_greedy, SPLITS
    )
    tl.store(p_token + i_row, token.to(tl.int64))
    tl.store(p_invalid + i_row, bad)
