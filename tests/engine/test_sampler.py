"""Sampling against an oracle that filters and draws one row at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from step_plans import sampling_rows, subset

from kvferry.engine.plan import LogitEdits, SamplingRows
from kvferry.engine.sampler import NUM_CANDIDATES, sample
from kvferry.kernels.sampling.philox import neg_log_exponential, uniform_words

torch.set_num_threads(1)

# Larger than all candidates, so that every path is taken.
LARGE_VOCAB = NUM_CANDIDATES[-1] + 1500


def survivors(x: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Mask of the ids that top-k, then top-p, then min-p leave of scaled logits ``x`` [V]."""
    falling = np.sort(x)[::-1]
    keep = x >= (falling[min(top_k, len(x)) - 1] if top_k else -np.inf)
    if top_p < 1:
        kept = np.sort(x[keep])[::-1]
        mass = np.exp(kept - kept[0])
        mass /= mass.sum()
        before = np.cumsum(mass) - mass
        keep &= x >= kept[before < top_p][-1]
    with np.errstate(divide="ignore"):
        return keep & (x >= falling[0] + np.log(min_p))


def oracle(logits: np.ndarray, rows: SamplingRows, row: int) -> int:
    """The token of one row, from the definition."""
    temperature = float(rows.temperature[row])
    if temperature == 0:
        return int(logits.argmax())
    x = logits.astype(np.float64) / temperature
    keep = survivors(x, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    ids = np.flatnonzero(keep)
    words = uniform_words(
        torch.from_numpy(rows.seed[row : row + 1].view(np.int64)),
        torch.tensor([int(rows.sample_index[row])]),
        torch.tensor([int(rows.position[row])]),
        torch.from_numpy(ids)[None],
    )
    return int(ids[(x[ids] + neg_log_exponential(words)[0].numpy()).argmax()])


def random_rows(rng: np.random.Generator, count: int) -> SamplingRows:
    return sampling_rows(
        count,
        temperature=rng.choice([0.0, 0.3, 0.7, 1.0, 1.5], count),
        top_k=rng.choice([0, 0, 1, 5, 50, 256, 257, 4096, 5000, 10**6], count),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 0.05, 1e-6], count),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.3, 1.0], count),
        seed=rng.integers(0, 2**64, count, dtype=np.uint64),
        sample_index=rng.integers(0, 64, count),
        position=rng.integers(0, 2**20, count),
    )


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 40, 700, LARGE_VOCAB])
def test_tokens_are_those_of_the_oracle(vocab_size: int, dtype: torch.dtype, scale: float) -> None:
    """Flat and peaked distributions; bfloat16 gives many exact ties, also at the thresholds."""
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=(24, vocab_size)) * scale).to(dtype)
    rows = random_rows(rng, 24)
    expected = [oracle(logits[i].double().numpy(), rows, i) for i in range(24)]
    assert sample(logits, rows, vocab_size).token_ids.tolist() == expected


def chance(tokens: np.ndarray, probability: np.ndarray) -> float:
    """Pearson's test: the chance of a worse fit. Ids expected fewer than 5 times count as one."""
    expected = probability * len(tokens)
    counts = np.bincount(tokens, minlength=len(probability))
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    seen = expected > 0
    statistic = ((counts[seen] - expected[seen]) ** 2 / expected[seen]).sum()
    half_freedom = torch.tensor((seen.sum() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2)))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.8},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_the_distribution_is_the_filtered_one(values: dict[str, Any], seed: int) -> None:
    draws, vocab_size = 6000, 60
    row = np.random.default_rng(3).normal(size=vocab_size)
    logits = torch.from_numpy(row).expand(draws, -1)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    # Over positions and sample indexes both.
    position, index = np.arange(draws) // 4, np.arange(draws) % 4
    rows = sampling_rows(draws, seed=seed, position=position, sample_index=index, **values)
    tokens = sample(logits, rows, vocab_size).token_ids
    x = row / np.float64(np.float32(values["temperature"]))
    keep = survivors(x, values["top_k"], values["top_p"], values["min_p"])
    probability = np.where(keep, np.exp(x - x.max()), 0)
    probability /= probability.sum()
    assert keep[tokens].all()
    assert keep.sum() > 1
    assert chance(tokens, probability) > 1e-3


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, in any order, beside other parameters, beside greedy rows (fault B017)."""
    rng = np.random.default_rng(17)
    logits = torch.from_numpy(rng.normal(size=(16, LARGE_VOCAB))).float()
    rows = random_rows(rng, 16)
    together = sample(logits, rows, LARGE_VOCAB).token_ids
    order = rng.permutation(16)
    shuffled = sample(logits[order], subset(rows, order), LARGE_VOCAB).token_ids
    assert shuffled.tolist() == together[order].tolist()
    for i in range(16):
        alone = sample(logits[i : i + 1], subset(rows, slice(i, i + 1)), LARGE_VOCAB).token_ids
        assert alone.tolist() == [together[i]]


@pytest.mark.parametrize("key", ["seed", "sample_index", "position"])
def test_each_part_of_the_key_changes_the_draws(key: str) -> None:
    logits = torch.zeros(1, 1000)
    tokens = {
        int(sample(logits, sampling_rows(1, temperature=1.0, **{key: value}), 1000).token_ids[0])
        for value in range(20)
    }
    assert len(tokens) > 15


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    assert sample(logits, sampling_rows(2), 4).token_ids.tolist() == [1, 0]


def test_filters_on_a_small_case() -> None:
    x = np.log([0.5, 0.25, 0.125, 0.125])
    assert survivors(x, 0, 1.0, 0.0).tolist() == [True] * 4
    assert survivors(x, 2, 1.0, 0.0).tolist() == [True, True, False, False]
    assert survivors(x, 3, 1.0, 0.0).tolist() == [True] * 4
    assert survivors(x, 0, 0.6, 0.0).tolist() == [True, True, False, False]
    # Renormalised after top-k: 2/3 and 1/3.
    assert survivors(x, 2, 0.6, 0.0).tolist() == [True, False, False, False]
    assert survivors(x, 0, 1.0, 0.3).tolist() == [True, True, False, False]
    assert survivors(x, 0, 1e-9, 0.0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_ids_are_never_sampled(temperature: float) -> None:
    """Embedding rows past the tokenizer's vocabulary (fault B020), however likely they seem."""
    logits = torch.zeros(50, 300)
    logits[:, 280:] = 50.0
    logits[0, 290] = torch.nan
    rows = sampling_rows(50, temperature=temperature, position=np.arange(50), logprobs={0: 20})
    result = sample(logits, rows, 280)
    assert (result.token_ids < 280).all()
    assert (len(set(result.token_ids.tolist())) == 1) == (temperature == 0)
    assert all(token < 280 for token, _ in result.logprobs[0].top)
    assert result.logprobs[0].logprob == pytest.approx(-math.log(280))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_invalid_logits_are_named_and_spare_the_neighbours(bad: float) -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(5, 100))).float()
    rows = sampling_rows(
        5, temperature=[0, 1, 1, 1, 0], seed=7, logprobs={1: 1, 2: 1}, edits={2: LogitEdits()}
    )
    expected = sample(logits, rows, 100)
    poisoned = logits.clone()
    poisoned[1, 99] = poisoned[4, 0] = bad
    result = sample(poisoned, rows, 100)
    assert result.invalid == (1, 4)
    assert result.token_ids.tolist() == [
        0 if row in (1, 4) else token for row, token in enumerate(expected.token_ids.tolist())
    ]
    assert result.logprobs == {2: expected.logprobs[2]}


def test_huge_finite_logits_are_valid() -> None:
    logits = torch.full((2, 100), 3e38)
    assert sample(logits, sampling_rows(2), 100).token_ids.tolist() == [0, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.normal(size=(3, 50)) * 3)
    before = logits.clone()
    best = int(logits[1].argmax())
    rows = sampling_rows(
        3,
        temperature=[0.0, 0.5, 1.0],
        top_k=[0, 1, 0],
        logprobs={1: 3, 2: 0},
        edits={1: LogitEdits(banned_ids=(best,))},
    )
    result = sample(logits, rows, 50)
    assert torch.equal(logits, before)
    raw = torch.log_softmax(logits, dim=-1)
    assert set(result.logprobs) == {1, 2}
    second = raw[1].argsort(descending=True).tolist()
    assert result.token_ids[1] == second[1]
    assert result.logprobs[1].token_id == second[1]
    assert result.logprobs[1].logprob == pytest.approx(float(raw[1, second[1]]))
    assert [token for token, _ in result.logprobs[1].top] == second[:3]
    assert [value for _, value in result.logprobs[1].top] == pytest.approx(
        raw[1, second[:3]].tolist()
    )
    assert result.logprobs[2].top == ()
    assert result.logprobs[2].logprob == pytest.approx(float(raw[2, result.token_ids[2]]))


@pytest.mark.parametrize("values", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}])
def test_banned_ids_are_never_drawn(values: dict[str, Any]) -> None:
    edit = LogitEdits(banned_ids=tuple(range(1, 30)))
    rows = sampling_rows(40, position=np.arange(40), edits=dict.fromkeys(range(40), edit), **values)
    tokens = sample(torch.zeros(40, 33), rows, 33).token_ids
    assert set(tokens.tolist()) <= {0, 30, 31, 32}


def test_no_rows_are_no_work() -> None:
    assert sample(torch.zeros(0, 10), sampling_rows(0), 10).token_ids.tolist() == []
