"""The noise against published answers and a scalar reference."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvferry.kernels.sampling.philox import (
    ACCEPT_DOMAIN,
    MAX_NEG_LOG_NOISE,
    RESIDUAL_DOMAIN,
    SAMPLE_DOMAIN,
    all_words,
    neg_log_exponential,
    philox4x32,
    uniform_words,
)

torch.set_num_threads(1)

# kat_vectors of Random123: counter, key, output.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """One block in Python integers, written after the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(c[0] * 0xD2511F53, 2**32)
        high_1, low_1 = divmod(c[2] * 0xCD9E8D57, 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def test_known_answers() -> None:
    counters = torch.tensor([words(counter) for counter, _, _ in KNOWN_ANSWERS]).T
    keys = torch.tensor([words(key) for _, key, _ in KNOWN_ANSWERS]).T
    c0, c1, c2, c3 = counters
    got = torch.stack(philox4x32((c0, c1, c2, c3), (keys[0], keys[1])), dim=-1)
    assert got.tolist() == [words(output) for _, _, output in KNOWN_ANSWERS]
    for counter, key, output in KNOWN_ANSWERS:
        assert scalar_philox(words(counter), words(key)) == words(output)


def test_words_are_keyed_as_documented() -> None:
    rng = np.random.default_rng(5)
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 0x1234567890ABCDEF], dtype=np.uint64)
    samples, positions = [0, 3, 63, 2**31 - 1, 1], [1, 0, 4096, 2**31, 7]
    ids = rng.integers(0, 200_000, size=(5, 6))
    ids[0] = [0, 1, 2, 3, 4, 5]
    got = uniform_words(
        torch.from_numpy(seeds.view(np.int64)),
        torch.tensor(samples),
        torch.tensor(positions),
        torch.from_numpy(ids),
    )
    for row, seed in enumerate(seeds.tolist()):
        for column, token in enumerate(ids[row].tolist()):
            counter = [token // 4, positions[row], samples[row], 0]
            block = scalar_philox(counter, [seed % 2**32, seed >> 32])
            assert int(got[row, column]) == block[token % 4]


def test_the_whole_vocabulary_is_the_same_noise() -> None:
    seed, sample, position = (torch.tensor(values) for values in ([9, -1], [0, 2], [5, 6]))
    ids = torch.arange(1003).expand(2, -1)
    whole = all_words(seed, sample, position, 1003)
    assert torch.equal(whole, uniform_words(seed, sample, position, ids))


def test_domains_are_the_fourth_counter_word() -> None:
    seed, sample, position = (torch.tensor([value]) for value in (9, 2, 5))
    for domain in (SAMPLE_DOMAIN, ACCEPT_DOMAIN, RESIDUAL_DOMAIN):
        block = scalar_philox([1, 5, 2, domain], [9, 0])
        assert all_words(seed, sample, position, 8, domain)[0, 4:].tolist() == block
    assert len({SAMPLE_DOMAIN, ACCEPT_DOMAIN, RESIDUAL_DOMAIN}) == 3


def test_noise_is_finite_at_both_ends_and_exponential_in_between() -> None:
    ends = neg_log_exponential(torch.tensor([0, 2**32 - 1]))
    assert ends.dtype == torch.float64
    assert float(ends[0]) == MAX_NEG_LOG_NOISE
    assert math.isclose(float(ends[1]), -math.log(33 * math.log(2)), rel_tol=1e-9)
    one = torch.ones(1, dtype=torch.int64)
    noise = (-neg_log_exponential(all_words(one, one, one, 200_000))).exp()
    assert abs(float(noise.mean()) - 1) < 0.01
    assert abs(float(noise.var()) - 1) < 0.03
    assert abs(float((noise > 2).double().mean()) - math.exp(-2)) < 0.003
