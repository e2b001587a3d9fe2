"""The next step, planned while one computes: when it is the one that is launched, and when not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fake_engine_model import expected
from hypothesis import given
from hypothesis import strategies as st
from overlap_rig import Before, Rig, closing
from role_ports import prompt_spec

from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.engine.plan import StepPlan
from kvferry.engine.sequences import State
from kvferry.engine.table import SequenceTable, build_ahead, build_plan, fill_ahead
from kvferry.proto import worker_pb2 as pb

PROMPT = list(range(10, 19))
NUM_TOKENS = 9
"""Of every answer: the first in the prompt's step, one in each step after it."""


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing() as made:
        yield made


def ahead(rig: Rig, count: int) -> list[bool]:
    """Whether each of the next ``count`` steps is one that was planned ahead."""
    before = len(rig.late.launched_ahead)
    rig.turn(count)
    return rig.late.launched_ahead[before:]


def test_steps_of_sequences_that_go_on_are_planned_ahead(rig: Rig) -> None:
    rig.start(1, PROMPT)
    # Before the first there was a prompt, and after the last nothing is left to foresee.
    assert ahead(rig, NUM_TOKENS) == [False] + [True] * (NUM_TOKENS - 2)
    assert rig.tokens(1) == expected(PROMPT, NUM_TOKENS)


def test_those_that_reach_their_most_tokens_are_not_in_it(rig: Rig) -> None:
    rig.start(1, PROMPT)
    rig.turn(3)
    rig.start(2, PROMPT[:6])
    rig.turn(1)
    assert all(ahead(rig, 7)), "the first ends among these"
    assert rig.state(1) is None
    assert rig.tokens(2) == expected(PROMPT[:6], NUM_TOKENS)


@pytest.mark.parametrize("what", ["cancel", "stop", "prompt"])
def test_it_is_dropped_for_what_could_not_be_foreseen(rig: Rig, what: str) -> None:
    rig.start(1, PROMPT)
    rig.start(2, PROMPT[:6])
    rig.turn(2)
    if what == "cancel":
        rig.late.meanwhile = lambda plan: rig.cancel(1)
    elif what == "stop":
        seq = rig.sequences.get(AttemptKey(rig.outbox.incarnation, 1, 1))
        rig.sequences.table.stop_ids[0, seq.row] = expected(PROMPT, 6)[len(rig.tokens(1))]
    else:
        prefill = rig.reserve(3, PROMPT[:5])
        rig.turn(1)
        rig.say(prefill=prefill)
    rig.turn(1)
    rig.late.meanwhile = lambda plan: None
    assert ahead(rig, 3) == [False, True, True]
    assert (rig.state(1) is None) or what == "prompt"
    rig.turn(NUM_TOKENS)
    for number, prompt in ((1, PROMPT), (2, PROMPT[:6])):
        wanted = expected(prompt, NUM_TOKENS)
        assert rig.tokens(number) == wanted[: len(rig.tokens(number))]
    assert rig.tokens(2) == expected(PROMPT[:6], NUM_TOKENS)
    assert rig.sequences.pool.counts().in_use == 0


def test_one_that_joins_while_a_step_computes_is_in_it(rig: Rig) -> None:
    """Its KV is found in the cache, so that only Start is missing."""
    rig.start(9, PROMPT[:8])
    rig.turn(NUM_TOKENS)
    rig.start(1, PROMPT)
    key = pb.Key(request=2, attempt=1)
    rig.say(reserve=pb.Reserve(key=key, sequence=prompt_spec(PROMPT[:8])))
    rig.turn(2)
    assert rig.state(2) is State.RESERVED
    first, *rest = expected(PROMPT[:8], NUM_TOKENS)
    joined = []

    def start(plan: StepPlan) -> None:
        rig.late.meanwhile = lambda plan: joined.append(len(plan.query_lens))
        rig.say(start=pb.Start(key=key, token_id=first))

    rig.late.meanwhile = start
    assert ahead(rig, 2) == [True, True]
    assert joined == [2]
    rig.turn(NUM_TOKENS)
    assert rig.tokens(2) == rest
    assert rig.tokens(1) == expected(PROMPT, NUM_TOKENS)


def test_a_failed_step_is_not_followed_by_the_one_planned_ahead(rig: Rig) -> None:
    rig.start(1, PROMPT)
    rig.start(2, PROMPT[:6])
    rig.turn(2)
    runner = rig.late.runner

    def fail() -> None:
        rig.late.runner = runner
        raise RuntimeError("once")

    rig.late.runner = Before(runner, fail)
    rig.turn(1)
    # Each is tried alone, then both go on together.
    assert ahead(rig, 2) == [False, False]
    rig.turn(NUM_TOKENS)
    assert rig.tokens(1) == expected(PROMPT, NUM_TOKENS)
    assert rig.tokens(2) == expected(PROMPT[:6], NUM_TOKENS)
    assert "failed" not in rig.kinds()


def test_it_takes_no_block_from_those_that_wait_for_one() -> None:
    """Blocks run out with the next token of both: one goes on, and nothing is lost."""
    with closing() as tight:
        tight.start(1, PROMPT[:7])
        tight.start(2, PROMPT[:6])
        pool = tight.sequences.pool
        taken = pool.allocate(pool.num_free)
        tight.turn(40)
        pool.release(taken)
        tight.turn(40)
        given_back = [m.preempted.key.request for m in tight.said if m.HasField("preempted")]
        for number, prompt in ((1, PROMPT[:7]), (2, PROMPT[:6])):
            wanted = expected(prompt, NUM_TOKENS)
            got = tight.tokens(number)
            assert got == (wanted[: len(got)] if number in given_back else wanted)
        assert pool.counts().in_use == 0


ROWS = st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=6)


@given(ROWS, st.integers(0, 2**32 - 1))
def test_it_is_the_plan_that_is_made_afterwards(rows: list[tuple[int, bool]], seed: int) -> None:
    """Every number of it, of rows that have joined since too."""
    rng = np.random.default_rng(seed)
    table = SequenceTable(max_rows=8, max_model_len=40, block_size=4)
    for number, (length, _) in enumerate(rows):
        sampling = pb.Sampling(
            max_tokens=9, temperature=rng.random(), top_k=number, top_p=0.5, seed=number
        )
        tokens = rng.integers(1000, size=length).tolist()
        spec = pb.SequenceSpec(token_ids=tokens, prompt_len=length, sampling=sampling)
        row = table.lend(AttemptKey(Incarnation(1), number, 1), spec)  # type: ignore[arg-type]
        table.computed[row] = length - 1
        table.set_blocks(row, rng.integers(99, size=-(-(length + 1) // 4)).tolist())
    which = np.arange(len(rows))
    pending = np.array([is_pending for _, is_pending in rows])
    planned = build_ahead(table, 7, which, pending)
    in_step = which[pending]
    table.computed[in_step] += 1
    table.append(in_step, table.length[in_step], rng.integers(1000, size=len(in_step)))
    fill_ahead(table, which, planned)
    fresh = build_plan(table, 7, which, np.ones(len(which), np.int32))
    for name in ("token_ids", "query_lens", "context_lens", "block_tables", "sampled"):
        ours, theirs = getattr(planned, name), getattr(fresh, name)
        assert ours.dtype == theirs.dtype, name
        assert np.array_equal(ours, theirs), name
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position"):
        assert np.array_equal(getattr(planned.sampling, name), getattr(fresh.sampling, name)), name
