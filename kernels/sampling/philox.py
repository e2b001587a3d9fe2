"""Counter-based noise: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011).

A word is a pure function of (seed, sample index, position, vocabulary id). There is no stream and
no state, so that neither the batch, nor chunking, preemption or placement can shift a row's noise.

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (vocabulary id // 4, position, sample index, domain)
    word    = output[vocabulary id % 4]

The domain keeps uses apart that must be independent of each other. The noise that draws tokens, of
the model and of those that draft for it, is domain 0. The rejection rule of speculation needs two
more: whether a draft is accepted (only word 0 of a position), and what replaces one that is not,
which must not depend on the noise that had chosen the draft. What a position's noise decides is
looked at only if everything before it was kept, so that a draft that was given up for another
reason leaves its noise fresh.

32-bit words live in int64 tensors: torch has few operations on unsigned integers. A product of two
of them wraps into the sign bit, which the mask after each shift removes.
"""

from __future__ import annotations

import math

import torch

ROUNDS = 10
SAMPLE_DOMAIN = 0
ACCEPT_DOMAIN = 1
RESIDUAL_DOMAIN = 2
MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85

MAX_NEG_LOG_NOISE = -math.log(-math.log1p(-0.5 * 2.0**-32))
"""Largest value of ``-log E``: the smallest noise, from word 0."""

Counter = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Counter, key: tuple[torch.Tensor, torch.Tensor]) -> Counter:
    """Ten rounds on 32-bit words in int64 tensors that broadcast to one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(ROUNDS):
        if i:
            k0 = (k0 + _WEYL_0) & MASK
            k1 = (k1 + _WEYL_1) & MASK
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & MASK) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & MASK) ^ c3 ^ k1
        c1 = product_1 & MASK
        c3 = product_0 & MASK
    return c0, c1, c2, c3


def uniform_words(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    vocab_ids: torch.Tensor,
    domain: int = SAMPLE_DOMAIN,
) -> torch.Tensor:
    """Words in [0, 2^32) as int64 [rows, candidates].

    ``seed`` (the bits of an unsigned 64-bit integer), ``sample_index`` and ``position`` are int64
    [rows]; ``vocab_ids`` is int64 [rows, candidates].
    """
    words = _words_of_groups(seed, sample_index, position, vocab_ids >> 2, domain)
    return torch.stack(words, dim=-1).gather(-1, (vocab_ids & 3).unsqueeze(-1)).squeeze(-1)


def all_words(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    vocab_size: int,
    domain: int = SAMPLE_DOMAIN,
) -> torch.Tensor:
    """Like :func:`uniform_words` for the ids 0 .. vocab_size - 1, at a quarter of the work."""
    groups = torch.arange((vocab_size + 3) // 4, device=seed.device).expand(len(seed), -1)
    words = _words_of_groups(seed, sample_index, position, groups, domain)
    return torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]


def neg_log_exponential(words: torch.Tensor) -> torch.Tensor:
    """``-log E`` in float64, E = -log1p(-u) exponentially distributed, u = (word + 0.5) * 2^-32."""
    uniform = (words.double() + 0.5) * 2.0**-32
    return torch.log1p(uniform.neg_()).neg_().log_().neg_()


def _words_of_groups(
    seed: torch.Tensor,
    sample_index: torch.Tensor,
    position: torch.Tensor,
    groups: torch.Tensor,
    domain: int,
) -> Counter:
    key = ((seed & MASK).unsqueeze(1), ((seed >> 32) & MASK).unsqueeze(1))
    last = torch.full_like(position, domain).unsqueeze(1)
    counter = (groups, position.unsqueeze(1) & MASK, sample_index.unsqueeze(1) & MASK, last)
    return philox4x32(counter, key)
