"""Noise inside kernels against the CPU's: the same words, and nearly the same numbers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvferry.kernels.sampling.noise_kernel import exponential, neg_log_exponential, words_of_ids
from kvferry.kernels.sampling.philox import all_words
from kvferry.kernels.sampling.philox import neg_log_exponential as exact_neg_log

E_BOUND = 1e-6
"""Relative error of E: a few roundings of float32. 1e-5 is what is promised."""
DEVICE_MORE = 2**-22 + 2**-23
"""What a GPU may add to the interpreter's error: its division is right to 2 units in the last place
(PTX's div.full), its logarithm to 1, where the interpreter has half of one.
"""


@triton.jit
def words_kernel(p_seed, p_sample, p_position, p_out, domain, BLOCK: tl.constexpr):
    i_row, i_split = tl.program_id(0), tl.program_id(1)
    b_words = words_of_ids(
        i_split * BLOCK,
        tl.load(p_position + i_row),
        tl.load(p_sample + i_row),
        tl.load(p_seed + i_row),
        domain,
        BLOCK,
    )
    p_row = p_out + (i_row * tl.num_programs(1) + i_split) * BLOCK
    tl.store(p_row + tl.arange(0, BLOCK), b_words.to(tl.int64))


@triton.jit
def noise_kernel(p_word, p_e, p_neg_log, BLOCK: tl.constexpr):
    o_w = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_word = tl.load(p_word + o_w).to(tl.uint32)
    tl.store(p_e + o_w, exponential(b_word))
    tl.store(p_neg_log + o_w, neg_log_exponential(b_word))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_words_are_those_of_the_cpu(device: str) -> None:
    seed = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0, 7])
    sample = torch.tensor([0, 2**31 - 1, 1, 63, 5, 0], dtype=torch.int32)
    position = torch.tensor([0, 2**31, 2**32 - 1, 1, 8191, 2**33 + 5])
    for domain in (0, 1, 2):
        out = torch.empty(len(seed), 512, dtype=torch.int64, device=device)
        rows = (part.to(device) for part in (seed, sample, position))
        words_kernel[(len(seed), 2)](*rows, out, domain, BLOCK=256)
        assert torch.equal(out.cpu(), all_words(seed, sample.long(), position, 512, domain))


@pytest.mark.parametrize("device", DEVICES)
def test_exponential_is_exact_to_float32_for_small_middle_and_large_words(device: str) -> None:
    near = torch.arange(2**16)
    words = torch.cat(
        [near, 2**31 - 2**15 + near, 2**32 - 1 - near, torch.randint(0, 2**32, (2**20,))]
    )
    e, neg_log = (torch.empty(len(words), device=device) for _ in range(2))
    # Large blocks are for the interpreter: a GPU has registers for a few elements per thread.
    block = 2**16 if device == "cpu" else 2**10
    noise_kernel[(len(words) // block,)](words.to(device), e, neg_log, BLOCK=block)
    e, neg_log = e.cpu(), neg_log.cpu()
    exact = exact_neg_log(words)
    relative = (e.double() / (-exact).exp() - 1).abs()
    assert float(relative.max()) <= E_BOUND - (DEVICE_MORE if device == "cpu" else 0.0)
    # -log E adds the rounding of numbers up to 23.
    assert float((neg_log.double() - exact).abs().max()) <= E_BOUND + 23 * 2**-24
