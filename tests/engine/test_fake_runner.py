"""The fake runner notices every way in which a cache can be wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import step_plan

from kvferry.cache.paged import PagedKV
from kvferry.engine.fake_runner import (
    FakeRunner,
    FastFakeRunner,
    WrongKV,
    fake_next_token,
    fake_output,
)
from kvferry.engine.plan import LogitEdits, StepPlan

torch.set_num_threads(1)

VOCAB_SIZE = 50_000
PROMPT = [11, 12, 13, 14, 15, 16, 17]
TABLE = [5, 2, 7]


def make_kv(**changes: int) -> PagedKV:
    numbers = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "block_size": 4, "num_blocks": 8}
    return PagedKV.allocate(**{**numbers, **changes}, dtype=torch.float32)


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_the_output_is_reproducible_on_its_own(chunk: int) -> None:
    kv = make_kv()
    runner = FakeRunner(kv, VOCAB_SIZE)
    tokens = list(PROMPT)
    for start in range(0, 7, chunk):
        part = tokens[start : start + chunk]
        result = runner.execute(step_plan([part], [start], [TABLE]))
    for _ in range(4):
        tokens.append(int(result.token_ids[0]))
        result = runner.execute(step_plan([tokens[-1:]], [len(tokens) - 1], [TABLE]))
    assert tokens[7:] == fake_output(PROMPT, 4, VOCAB_SIZE)
    assert result.token_ids[0] == fake_next_token(tokens, VOCAB_SIZE)
    runner.check_context(TABLE, tokens)
    with pytest.raises(WrongKV):
        runner.check_context(TABLE, [*tokens[:-1], 0])


def test_seed_and_sample_index_matter_unless_greedy() -> None:
    def token(**values: float) -> int:
        plan = step_plan([PROMPT], [0], [TABLE], **values)
        return int(FakeRunner(make_kv(), VOCAB_SIZE).execute(plan).token_ids[0])

    assert token(seed=5) == token() == fake_next_token(PROMPT, VOCAB_SIZE)
    sampled = token(seed=5, temperature=1.0, sample_index=2)
    assert sampled == fake_next_token(PROMPT, VOCAB_SIZE, seed=5, sample_index=2)
    assert len({sampled, token(temperature=1.0), token(seed=5, temperature=1.0)}) == 3


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("place", range(4))
def test_any_wrong_element_is_noticed(layer: int, part: int, head: int, place: int) -> None:
    kv = make_kv()
    runner = FakeRunner(kv, VOCAB_SIZE)
    runner.execute(step_plan([PROMPT], [0], [TABLE]))
    kv.tensor[layer, part, TABLE[1], 2, head, place] += 1
    with pytest.raises(WrongKV, match="position 6"):
        runner.execute(step_plan([[1]], [7], [TABLE]))


@pytest.mark.parametrize(
    ("context", "table"),
    [
        (7, [2, 5, 7]),  # swapped
        (7, [5, 3, 7]),  # never written
        (8, TABLE),  # one position is missing
        (7, [5, 8, 7]),  # outside the cache
        (7, [5, -1, 7]),
        (6, [2, 2, 7]),
    ],
)
def test_wrong_tables_are_noticed(context: int, table: list[int]) -> None:
    runner = FakeRunner(make_kv(), VOCAB_SIZE)
    runner.execute(step_plan([PROMPT], [0], [TABLE]))
    with pytest.raises(WrongKV):
        runner.execute(step_plan([[1]], [context], [table]))


def test_one_wrong_token_changes_the_output() -> None:
    """KV that is consistent but of another prompt: nothing to raise about, another token."""
    outputs = []
    for prompt in (PROMPT, [99, *PROMPT[1:]]):
        runner = FakeRunner(make_kv(), VOCAB_SIZE)
        runner.execute(step_plan([prompt], [0], [TABLE]))
        outputs.append(runner.execute(step_plan([[1]], [7], [TABLE])).token_ids[0])
    assert outputs[0] != outputs[1]


def test_writes_to_shared_slots_are_noticed() -> None:
    runner = FakeRunner(make_kv(), VOCAB_SIZE)
    with pytest.raises(WrongKV, match="same slot"):
        runner.execute(step_plan([[1, 2], [3]], [0, 0], [[1], [1]]))
    runner.execute(step_plan([PROMPT], [0], [TABLE]))
    with pytest.raises(WrongKV, match="reads"):
        runner.execute(step_plan([[1], [9]], [7, 0], [TABLE, TABLE[1:]]))


def test_a_wrong_position_is_noticed() -> None:
    runner = FakeRunner(make_kv(), VOCAB_SIZE)
    with pytest.raises(WrongKV, match="position 8, not 7"):
        runner.execute(step_plan([PROMPT], [0], [TABLE], position=[8]))
    with pytest.raises(WrongKV, match="head_dim"):
        FakeRunner(make_kv(head_dim=8), VOCAB_SIZE)


def test_bans_and_forcing_biases() -> None:
    natural = fake_next_token(PROMPT, VOCAB_SIZE)
    edits = [
        LogitEdits(banned_ids=(natural,)),
        LogitEdits(logit_bias={natural: -100.0}),
        LogitEdits(logit_bias={3: 100.0, 4: 99.0}),
        LogitEdits(logit_bias={3: 100.0}, banned_ids=(3,)),
    ]
    tokens = []
    for edit in edits:
        plan = step_plan([PROMPT], [0], [TABLE], edits={0: edit}, logprobs={0: 3})
        result = FakeRunner(make_kv(), VOCAB_SIZE).execute(plan)
        tokens.append(int(result.token_ids[0]))
        assert result.logprobs[0].token_id == tokens[-1]
        assert len(result.logprobs[0].top) == 3
    assert tokens == [natural + 1, natural + 1, 3, natural]


def test_hooks_run_around_the_computation() -> None:
    kv, seen = make_kv(), []

    def note(plan: StepPlan) -> None:
        seen.append(bool(kv.tensor.any()))

    runner = FakeRunner(kv, VOCAB_SIZE, before_execute=note, delay=note)
    runner.execute(step_plan([PROMPT], [0], [TABLE]))
    assert seen == [False, True]
    assert runner.num_steps == 1


def test_the_fast_one_cycles() -> None:
    plan = step_plan([[1], [2], [3]], [0, 0, 0], [[0], [1], [2]], sampled=[0, 2])
    plan.step = 9
    result = FastFakeRunner(10).execute(plan)
    assert result.token_ids.tolist() == [9, 0]
    assert result.token_ids.dtype == np.int64
