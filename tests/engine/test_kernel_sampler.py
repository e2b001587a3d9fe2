"""Sampling by kernels, in the interpreter, against sampling on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import sampling_rows

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
    """Ids past the vocabulary are the likeliest: they must never be drawn."""
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
