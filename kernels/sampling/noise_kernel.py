"""Philox words and exponential noise, as in ``philox``, for use inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.sampling.philox import ACCEPT_DOMAIN as _ACCEPT_DOMAIN
from kvferry.kernels.sampling.philox import RESIDUAL_DOMAIN as _RESIDUAL_DOMAIN
from kvferry.kernels.sampling.philox import SAMPLE_DOMAIN as _SAMPLE_DOMAIN

SAMPLE_DOMAIN = tl.constexpr(_SAMPLE_DOMAIN)
ACCEPT_DOMAIN = tl.constexpr(_ACCEPT_DOMAIN)
RESIDUAL_DOMAIN = tl.constexpr(_RESIDUAL_DOMAIN)


@triton.jit
def philox4x32(b_group, position, sample_index, seed, domain):
    """Four uint32 words for each counter (group, position, sample index, domain).

    b_group int32 [G]; position and seed int64 scalars, sample_index an int32 scalar.
    """
    b_zero = b_group.to(tl.uint32) * 0
    b_c0 = b_group.to(tl.uint32)
    b_c1 = b_zero + (position & 0xFFFFFFFF).to(tl.uint32)
    b_c2 = b_zero + sample_index.to(tl.uint32)
    b_c3 = b_zero + domain
    # The keys stay in 64 bits: their sums wrap around, which the interpreter warns of in scalars.
    k0 = seed & 0xFFFFFFFF
    k1 = (seed >> 32) & 0xFFFFFFFF
    for _ in tl.static_range(10):
        b_high0 = tl.umulhi(b_c0, 0xD2511F53)
        b_high1 = tl.umulhi(b_c2, 0xCD9E8D57)
        b_low0 = b_c0 * 0xD2511F53
        b_low1 = b_c2 * 0xCD9E8D57
        b_c0 = b_high1 ^ b_c1 ^ k0.to(tl.uint32)
        b_c2 = b_high0 ^ b_c3 ^ k1.to(tl.uint32)
        b_c1 = b_low1
        b_c3 = b_low0
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return b_c0, b_c1, b_c2, b_c3


@triton.jit
def words_of_ids(first_id, position, sample_index, seed, domain, BLOCK: tl.constexpr):
    """uint32 words of the BLOCK ids from ``first_id``, a multiple of 4, on."""
    b_group = first_id // 4 + tl.arange(0, BLOCK // 4)
    b_w0, b_w1, b_w2, b_w3 = philox4x32(b_group, position, sample_index, seed, domain)
    return tl.interleave(tl.interleave(b_w0, b_w2), tl.interleave(b_w1, b_w3))


@triton.jit
def exponential(b_word):
    """E = -log1p(-u), u = (word + 0.5) / 2^32, in float32, within 1e-6 of the exact E.

    1 - u comes from the word's complement, without cancellation. Below u = 1/2, where a logarithm
    would see a number near 1, E = 2 atanh(u / (2 - u)), whose series is short there.
    """
    b_low = (b_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_high = ((b_word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    b_s = b_low / (1.0 + b_high)
    b_s2 = b_s * b_s
    b_sum = 1.0 / 13.0
    b_sum = b_sum * b_s2 + 1.0 / 11.0
    b_sum = b_sum * b_s2 + 1.0 / 9.0
    b_sum = b_sum * b_s2 + 1.0 / 7.0
    b_sum = b_sum * b_s2 + 1.0 / 5.0
    b_sum = b_sum * b_s2 + 1.0 / 3.0
    b_sum = b_sum * b_s2 + 1.0
    return tl.where(b_word < 0x80000000, 2.0 * b_s * b_sum, -tl.log(b_high))


@triton.jit
def neg_log_exponential(b_word):
    """-log E: what a candidate's score has on top of its log-probability."""
    return -tl.log(exponential(b_word))
