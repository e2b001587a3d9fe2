"""Log-probabilities of the chosen token and of the likeliest ids, without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.row_kernel import NEG_INF, NO_ID, load_split, mass_of


# What a request asks for is no reason to compile.
@triton.jit(do_not_specialize=["count"])
def top_of_split_kernel(
    p_logits,
    p_rows,
    p_top,
    p_mass,
    p_best,
    p_best_id,
    stride,
    vocab_size,
    num_splits,
    count,
    BLOCK: tl.constexpr,
):
    """Largest logit and mass of each split, and its ``count`` best, one after the other."""
    i_query, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = tl.load(p_rows + i_query).to(tl.int64)
    o_v, b_l = load_split(p_logits, i_row, i_split, stride, vocab_size, BLOCK)
    i_out = i_query * num_splits + i_split
    top = tl.max(b_l, axis=0)
    tl.store(p_top + i_out, top)
    tl.store(p_mass + i_out, tl.sum(mass_of(b_l, top, 1.0), axis=0))
    j = 0
    while j < count:
        best = tl.max(b_l, axis=0)
        best_id = tl.min(tl.where(b_l == best, o_v, NO_ID), axis=0)
        tl.store(p_best + i_out * count + j, best)
        tl.store(p_best_id + i_out * count + j, best_id)
        # Ids that are taken are below all others; a split of fewer ids yields -inf.
        b_l = tl.where(o_v == best_id, NEG_INF, b_l)
        j += 1


@triton.jit(do_not_specialize=["count"])
def merge_top_kernel(
    p_logits,
    p_rows,
    p_token,
    p_top,
    p_mass,
    p_best,
    p_best_id,
    p_chosen,
    p_ids,
    p_values,
    stride,
    vocab_size,
    num_splits,
    count,
    SPLITS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """log p = logit - logsumexp, of the token and of the best among the best of the splits."""
    i_query = tl.program_id(0).to(tl.int64)
    i_row = tl.load(p_rows + i_query).to(tl.int64)
    o_s = tl.arange(0, SPLITS)
    b_top = tl.load(p_top + i_query * num_splits + o_s, mask=o_s < num_splits, other=NEG_INF)
    b_mass = tl.load(p_mass + i_query * num_splits + o_s, mask=o_s < num_splits, other=0.0)
    top = tl.max(b_top, axis=0)
    log_mass = tl.log(tl.sum(b_mass * mass_of(b_top, top, 1.0), axis=0))
    token = tl.load(p_token + i_query)
    m_token = (token >= 0) & (token < vocab_size)
    logit = tl.load(p_logits + i_row * stride + token, mask=m_token, other=NEG_INF)
    tl.store(p_chosen + i_query, (logit.to(tl.float32) - top) - log_mass)
    o_c = tl.arange(0, SPLITS * COUNT)
    o_split, o_j = o_c // COUNT, o_c % COUNT
    m_c = (o_split < num_splits) & (o_j < count)
    p_at = (i_query * num_splits + o_split) * count + o_j
    b_best = tl.load(p_best + p_at, mask=m_c, other=NEG_INF)
    b_id = tl.load(p_best_id + p_at, mask=m_c, other=NO_ID)
    j = 0
    while j < count:
        best = tl.max(b_best, axis=0)
        best_id = tl.min(tl.where(b_best == best, b_id, NO_ID), axis=0)
        tl.store(p_values + i_query * count + j, (best - top) - log_mass)
        tl.store(p_ids + i_query * count + j, best_id)
        b_best = tl.where(b_id == best_id, NEG_INF, b_best)
        j += 1
