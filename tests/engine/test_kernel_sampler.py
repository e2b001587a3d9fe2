"""Sampling by kernels, in the interpreter, against sampling on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import sampling_rows, subset

from kvferry.engine.kernel_sampler import KernelSampler
from kvferry.engine.plan import LogitEdits, SamplingRows
from kvferry.engine.sampler import sample
from kvferry.kernels.ops import Backend, ops_for

torch.set_num_threads(1)

ROWS, VOCAB, WIDTH = 8, 200, 210


@pytest.fixture(scope="module")
def sampler() -> KernelSampler:
    return KernelSampler(ops_for(Backend.TRITON))


def random_logits(rng: np.random.Generator) -> torch.Tensor:
    """Ids past the vocabulary are the likeliest: they must never be drawn (fault B020)."""
    logits = torch.from_numpy(rng.normal(size=(ROWS, WIDTH)).astype(np.float32)) * 3
    logits[:, VOCAB:] = 50.0
    return logits


def random_rows(rng: np.random.Generator) -> SamplingRows:
    return sampling_rows(
        ROWS,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5], ROWS),
        top_k=rng.choice([0, 1, 5, 50, 500], ROWS),
        top_p=rng.choice([1.0, 0.9, 0.5], ROWS),
        min_p=rng.choice([0.0, 0.1], ROWS),
        seed=rng.integers(0, 2**64, ROWS, dtype=np.uint64),
        sample_index=rng.integers(0, 64, ROWS),
        position=rng.integers(0, 2**20, ROWS),
    )


def test_tokens_with_edits_and_filters(sampler: KernelSampler, seeded: int) -> None:
    rng = np.random.default_rng(seeded)
    logits, rows = random_logits(rng), random_rows(rng)
    rows.edits = {
        1: LogitEdits(
            repetition_penalty=1.3,
            prompt_ids=rng.integers(0, VOCAB, 30).astype(np.int32),
            output_ids=rng.integers(0, VOCAB, 9).astype(np.int32),
        ),
        3: LogitEdits(
            presence_penalty=0.5,
            frequency_penalty=0.4,
            output_ids=rng.integers(0, 9, 40).astype(np.int32),
            logit_bias={3: 4.0, 7: -2.5, VOCAB + 1: 99.0},
        ),
        4: LogitEdits(banned_ids=(int(logits[4, :VOCAB].argmax()), 10**6)),
        6: LogitEdits(frequency_penalty=1.0, presence_penalty=-1.0),
    }
    expected = sample(logits, rows, VOCAB)
    found = sampler(logits, rows, VOCAB)
    assert found.token_ids.dtype == np.int64
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.invalid == expected.invalid == ()


def test_log_probabilities_are_of_the_raw_logits(sampler: KernelSampler, seeded: int) -> None:
    rng = np.random.default_rng(seeded)
    logits, rows = random_logits(rng), random_rows(rng)
    rows.edits = {0: LogitEdits(logit_bias={5: 30.0})}
    rows.logprobs = {0: 3, 2: 0, 7: 20}
    expected, found = sample(logits, rows, VOCAB), sampler(logits, rows, VOCAB)
    assert found.token_ids[0] == 5
    assert found.logprobs.keys() == expected.logprobs.keys()
    for row, wanted in expected.logprobs.items():
        got = found.logprobs[row]
        assert got.token_id == wanted.token_id
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]
        assert [x for _, x in got.top] == pytest.approx([x for _, x in wanted.top], abs=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(sampler: KernelSampler, seeded: int) -> None:
    """Alone, in another order, beside other parameters and beside greedy rows (fault B017)."""
    rng = np.random.default_rng(seeded)
    logits, rows = random_logits(rng), random_rows(rng)
    together = sampler(logits, rows, VOCAB).token_ids
    order = rng.permutation(ROWS)
    shuffled = sampler(logits[order], subset(rows, order), VOCAB).token_ids
    assert shuffled.tolist() == together[order].tolist()
    for row in (0, 5):
        alone = sampler(logits[row : row + 1], subset(rows, slice(row, row + 1)), VOCAB).token_ids
        assert alone.tolist() == [together[row]]


def test_log_probabilities_of_peaked_rows_are_finite(sampler: KernelSampler, seeded: int) -> None:
    """However unlikely a token is, and whatever filters and bans leave of the rest (fault B018)."""
    rng = np.random.default_rng(seeded)
    logits = random_logits(rng)
    logits[:, :VOCAB] *= torch.logspace(0, 30, ROWS)[:, None]
    top = int(logits[3, :VOCAB].argmax())
    values = {"top_k": 1, "top_p": 0.3, "logprobs": dict.fromkeys(range(ROWS), 20)}
    rows = sampling_rows(ROWS, temperature=1.0, **values)
    rows.edits = {3: LogitEdits(banned_ids=(top,))}
    expected, found = sample(logits, rows, VOCAB), sampler(logits, rows, VOCAB)
    assert found.invalid == ()
    assert found.token_ids[3] != top
    for row, wanted in expected.logprobs.items():
        got = found.logprobs[row]
        assert got.token_id == wanted.token_id
        assert got.logprob == pytest.approx(wanted.logprob, rel=1e-5, abs=1e-4)
        assert [x for _, x in got.top] == pytest.approx(
            [x for _, x in wanted.top], rel=1e-5, abs=1e-4
        )
        assert np.isfinite([got.logprob, *(x for _, x in got.top)]).all()


def test_a_row_that_is_not_finite_is_named(sampler: KernelSampler, seeded: int) -> None:
    rng = np.random.default_rng(seeded)
    logits, rows = random_logits(rng), random_rows(rng)
    logits[2, 11], logits[5, 0] = torch.nan, torch.inf
    rows.logprobs = {2: 1, 3: 1}
    rows.edits = {5: LogitEdits(banned_ids=(0,))}
    expected, found = sample(logits, rows, VOCAB), sampler(logits, rows, VOCAB)
    assert found.invalid == expected.invalid == (2, 5)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.logprobs.keys() == {3}
