"""Verification of drafts: kernels against the reference, the reference against probability."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_data import NEAR, random_logits, random_params

from kvferry.kernels.sampling import reference, wrapper
from kvferry.kernels.sampling.tensors import MAX_DRAFTS, DraftTensors, SamplingTensors

torch.set_num_threads(1)

NO_ID = 2**40
"""In bonus rows, which have no draft."""


def offsets_of(counts: list[int]) -> torch.Tensor:
    """First rows of sequences with so many drafts each."""
    return torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int()


def random_drafts(
    generator: torch.Generator,
    logits: torch.Tensor,
    params: SamplingTensors,
    offsets: torch.Tensor,
    *,
    with_probs: bool,
) -> DraftTensors:
    """Drafts that are right about as often as not."""
    rows, vocab_size = logits.shape
    right = reference.sample(logits, params, vocab_size).token_ids
    guess = torch.randint(vocab_size, (rows,), generator=generator)
    token_ids = torch.where(torch.rand(rows, generator=generator) < 0.6, right, guess)
    token_ids[offsets[1:].long() - 1] = NO_ID
    probs = None
    if with_probs:
        near = logits / params.temperature.clamp(min=0.1).unsqueeze(1)
        probs = (near + torch.randn(rows, vocab_size, generator=generator)).softmax(dim=-1)
        probs[offsets[1:].long() - 1] = torch.nan
    return DraftTensors(offsets=offsets, token_ids=token_ids, probs=probs)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    vocab_size=st.sampled_from([2, 256, 300]),
    with_probs=st.booleans(),
    filtered=st.booleans(),
)
def test_rejection_is_the_reference(
    seed: int, counts: list[int], vocab_size: int, with_probs: bool, filtered: bool
) -> None:
    generator, offsets = torch.Generator().manual_seed(seed), offsets_of(counts)
    logits = random_logits(generator, int(offsets[-1]), vocab_size)
    params = random_params(generator, len(logits), filtered=filtered)
    drafts = random_drafts(generator, logits, params, offsets, with_probs=with_probs)
    got = wrapper.verify_rejection(logits, params, drafts, vocab_size)
    moved = [
        reference.verify_rejection(
            logits,
            replace(params, top_p=torch.where(params.top_p < 1, params.top_p * s, 1.0)),
            drafts,
            vocab_size,
        )
        for s in (1.0, 1 - NEAR, 1 + NEAR)
    ]
    for seq in range(len(counts)):
        assert any(
            got.num_accepted[seq] == each.num_accepted[seq]
            and torch.equal(got.token_ids[seq], each.token_ids[seq])
            for each in moved
        ), f"{got} is not {moved[0]}"
    assert not got.invalid.any()


@pytest.mark.parametrize("op", [wrapper, reference])
def test_what_float32_has_no_normal_number_for_is_not_drawn(op: ModuleType) -> None:
    """p - q is 1e-40 for id 9, and nothing elsewhere: chips differ in whether they keep that."""
    logits = torch.full((2, 40), -500.0)
    logits[:, 7], logits[:, 9] = 500.0, 408.0
    params = random_params(torch.Generator().manual_seed(0), 2, filtered=False, temperature=1.0)
    q = torch.zeros(2, 40)
    q[:, 7] = 1.0
    drafts = DraftTensors(offsets=offsets_of([1]), token_ids=torch.tensor([3, NO_ID]), probs=q)
    got = op.verify_rejection(logits, params, drafts, 40)
    assert got.num_accepted.tolist() == [0]
    assert got.token_ids[0, :2].tolist() == [7, 0]


@pytest.mark.parametrize("op", [wrapper, reference])
def test_a_draft_that_its_own_model_never_draws_is_not_the_replacement(op: ModuleType) -> None:
    """p = q, all on id 7, and a draft with q = 0: nothing is left of p - q to draw from."""
    logits = torch.full((2, 40), -500.0)
    logits[:, 7] = 500.0
    params = random_params(torch.Generator().manual_seed(0), 2, filtered=False, temperature=1.0)
    offsets, token_ids = offsets_of([1]), torch.tensor([3, NO_ID])
    drafts = DraftTensors(offsets=offsets, token_ids=token_ids, probs=logits.softmax(dim=-1))
    got = op.verify_rejection(logits, params, drafts, 40)
    assert got.num_accepted.tolist() == [0]
    assert got.token_ids[0, :2].tolist() == [7, 0]


def test_the_longest_draft() -> None:
    generator, offsets = torch.Generator().manual_seed(5), offsets_of([MAX_DRAFTS, 2])
    logits = torch.randn(int(offsets[-1]), 40, generator=generator)
    params = random_params(generator, len(logits), filtered=False, temperature=0.0)
    drafts = DraftTensors(offsets=offsets, token_ids=logits.argmax(dim=1))
    for op in (wrapper, reference):
        for verify in (op.verify_rejection, op.verify_coupled):
            got = verify(logits, params, drafts, 40)
            assert got.num_accepted.tolist() == [MAX_DRAFTS, 2]
            assert torch.equal(got.token_ids[0], drafts.token_ids[: MAX_DRAFTS + 1])
            assert got.token_ids[1, :3].tolist() == drafts.token_ids[-3:].tolist()
            assert not got.token_ids[1, 3:].any()


@settings(max_examples=5)
@given(
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    filtered=st.booleans(),
)
def test_coupled_tokens_are_those_of_the_run_without_drafts(
    seed: int, counts: list[int], filtered: bool
) -> None:
    generator, offsets = torch.Generator().manual_seed(seed), offsets_of(counts)
    logits = random_logits(generator, int(offsets[-1]), 256)
    params = random_params(generator, len(logits), filtered=filtered)
    drafts = random_drafts(generator, logits, params, offsets, with_probs=False)
    alone = wrapper.sample(logits, params, 256).token_ids
    got = wrapper.verify_coupled(logits, params, drafts, 256)
    for seq, count in enumerate(counts):
        start, kept = int(offsets[seq]), int(got.num_accepted[seq])
        run = alone[start : start + kept + 1]
        assert got.token_ids[seq].tolist() == run.tolist() + [0] * (MAX_DRAFTS - kept)
        assert torch.equal(run[:kept], drafts.token_ids[start : start + kept])
        assert kept == count or run[kept] != drafts.token_ids[start + kept]


@pytest.mark.parametrize("rule", ["verify_rejection", "verify_coupled"])
@pytest.mark.parametrize("op", [wrapper, reference])
def test_drafts_end_at_a_row_that_is_not_finite(op, rule: str) -> None:  # type: ignore[no-untyped-def]
    offsets = offsets_of([3, 3, 0])
    logits = torch.zeros(9, 300)
    logits[:, 280] = 50.0
    logits[2, 5], logits[7, 290] = torch.nan, torch.inf
    params = random_params(torch.Generator(), 9, filtered=False, temperature=1.0)
    # The draft of the bad row is the token that bad rows are given.
    token_ids = torch.full((9,), 280)
    token_ids[2] = 0
    drafts = DraftTensors(offsets=offsets, token_ids=token_ids)
    got = getattr(op, rule)(logits, params, drafts, 300)
    assert got.num_accepted.tolist() == [2, 3, 0]
    assert got.invalid.tolist() == [True, True, False]
    assert got.token_ids[:, :4].tolist() == [[280, 280, 0, 0], [280, 280, 280, 0], [280, 0, 0, 0]]


@pytest.mark.parametrize("op", [wrapper, reference])
@pytest.mark.parametrize("with_probs", [False, True])
def test_a_rejected_draft_is_not_drawn_again(op, with_probs: bool) -> None:  # type: ignore[no-untyped-def]
    offsets, logits = offsets_of([1] * 16), torch.zeros(32, 2)
    probs = torch.tensor([1.0, 0.0]).expand(32, -1).contiguous() if with_probs else None
    drafts = DraftTensors(offsets=offsets, token_ids=torch.zeros(32).long(), probs=probs)
    params = random_params(torch.Generator().manual_seed(4), 32, filtered=False, temperature=1.0)
    got = op.verify_rejection(logits, params, drafts, 2)
    rejected = got.num_accepted == 0
    assert 0 < int(rejected.sum()) < 16
    assert got.token_ids[rejected, 0].tolist() == [1] * int(rejected.sum())


def test_rejection_without_drafts_is_sampling() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed())
    logits, params = random_logits(generator, 4, 256), random_params(generator, 4)
    drafts = DraftTensors(offsets=offsets_of([0] * 4), token_ids=torch.full((4,), NO_ID))
    for op in (wrapper, reference):
        got = op.verify_rejection(logits, params, drafts, 256)
        assert torch.equal(got.token_ids[:, 0], op.sample(logits, params, 256).token_ids)


def test_equal_distributions_accept_every_draft() -> None:
    logits = torch.randn(400, 50)
    params = random_params(torch.Generator(), 400, filtered=False, temperature=1.0)
    drafts = DraftTensors(
        offsets=offsets_of([1] * 200),
        token_ids=reference.sample(logits, params, 50).token_ids,
        probs=logits.double().softmax(dim=-1).float(),
    )
    assert reference.verify_rejection(logits, params, drafts, 50).num_accepted.tolist() == [1] * 200
