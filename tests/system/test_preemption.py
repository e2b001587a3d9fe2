"""A worker whose blocks run out: swaps, sequences given back, and what they cost."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pressure_rig import MAX_MODEL_LEN, PressureRig, Request
from step_costs import calls_of

from kvferry.core.ids import RequestId
from kvferry.decode_worker.scheduler import victims
from kvferry.engine.ports import Relief
from kvferry.engine.sequences import State


def finish(rig: PressureRig, within: int = 4000) -> int:
    """Turn until all is over. Returns how many turns it took."""
    for turns in range(within):
        rig.check()
        if all(request.outcome for request in rig.requests):
            rig.turn()
            return turns
        rig.turn()
    raise AssertionError([(r.number, rig.state(r)) for r in rig.requests if not r.outcome])


def prompt(first: int, length: int = 10) -> list[int]:
    return [first, *range(50, 49 + length)]


@pytest.mark.parametrize("slots", [0, 6, 100])
@pytest.mark.parametrize("num_blocks", [16, 17, 24])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_sequences_that_outgrow_the_pool_all_finish(
    slots: int, num_blocks: int, prefix_cache: bool
) -> None:
    rig = PressureRig(num_blocks, slots, prefix_cache=prefix_cache)
    for i in range(6):
        rig.submit(prompt(i), 50)
    finish(rig)
    rig.check_end()
    assert {request.outcome for request in rig.requests} == {"done"}
    swaps, returns = rig.role.preemptions[Relief.SWAP], rig.role.preemptions[Relief.GIVE_BACK]
    assert (swaps > 0, returns > 0) == (slots > 0, slots < 100)
    told = {str(relief): count for relief, count in rig.role.preemptions.items()}
    assert rig.loop.load().preemptions == told
    for request in rig.requests:
        assert max(request.computed.values()) <= 1 + request.given_back <= 2
    if slots == 100:
        assert {max(request.computed.values()) for request in rig.requests} == {1}


@pytest.mark.parametrize("growth", [1, 4, 16])
def test_nobody_has_to_go_in_the_steps_that_the_ledger_keeps_room_for(growth: int) -> None:
    rng = random.Random(growth)
    rig = PressureRig(18, 200, growth_tokens=growth)
    admitted_at, num_preempted = 0, 0
    holders: set[RequestId] = set()
    for turn in range(600):
        while sum(not request.outcome for request in rig.requests) < 6:
            rig.submit(prompt(rng.randrange(90), rng.randint(1, 30)), rng.randint(1, 30))
        rig.turn()
        if rig.role.preemptions[Relief.SWAP] > num_preempted:
            assert turn - admitted_at >= growth
            num_preempted = rig.role.preemptions[Relief.SWAP]
        now = {seq.key.request for seq in rig.sequences if seq.blocks}
        if now - holders:
            admitted_at = turn
        holders = now
    assert num_preempted, "nobody had to go at all"


def all_ran(rig: PressureRig, num_turns: int = 4) -> None:
    for _ in range(num_turns):
        rig.turn()
    assert {rig.state(request) for request in rig.requests} == {State.DECODING}


def test_swapped_sequences_come_back_oldest_first_and_before_anybody_new() -> None:
    rig = PressureRig(16, 40, growth_tokens=1, max_batch_tokens=64, prefix_cache=False)
    first, second, third = (rig.submit(prompt(i, 15), 12) for i in range(3))
    all_ran(rig)
    for request in (second, third, first):
        rig.preempt(request, Relief.SWAP)
    rig.turn()
    assert {rig.state(request) for request in rig.requests} == {State.SWAPPED}
    tiny = rig.submit(prompt(9, 2), 2)
    rig.gate.keeps = {second.number}
    rig.turn()
    # There is room for all; one that is held back holds back those behind it.
    states = [rig.state(request) for request in (first, second, third, tiny)]
    assert states == [State.DECODING, State.SWAPPED, State.SWAPPED, State.WAITING]
    rig.gate.keeps = set()
    rig.turn()
    assert [rig.state(request) for request in (second, third)] == [State.DECODING] * 2
    finish(rig)
    rig.check_end()


def test_a_request_is_as_old_as_its_first_attempt() -> None:
    """Its router sends it out again, later than others came: those are newer still."""
    rig = PressureRig(16, 40, growth_tokens=1, max_batch_tokens=64, prefix_cache=False)
    old, new = (rig.submit(prompt(i, 15), 40) for i in range(2))
    all_ran(rig)
    rig.send_again(old)
    all_ran(rig)
    while not rig.role.preemptions[Relief.SWAP]:
        rig.turn()
    assert (rig.state(old), rig.state(new)) == (State.DECODING, State.SWAPPED)


def test_a_step_that_fails_gives_back_what_it_moved_and_no_more() -> None:
    rig = PressureRig(20, 40, growth_tokens=1, max_batch_tokens=64, prefix_cache=False)
    moved, *others = (rig.submit(prompt(i, 15), 20) for i in range(3))
    all_ran(rig)
    rig.preempt(moved, Relief.SWAP)
    rig.fail = AlwaysFails()
    rig.turn()
    rig.fail = None
    assert rig.state(moved) is None
    assert [rig.state(request) for request in others] == [State.DECODING] * 2
    finish(rig)
    rig.check_end()
    assert [request.given_back for request in rig.requests] == [1, 0, 0]


class AlwaysFails(random.Random):
    def randrange(self, *args: object, **kwargs: object) -> int:
        return 0


def chosen(lacking: str, guaranteed: str, num_free: int = 0, each: int = 2) -> list[int]:
    """Sequences as characters, the oldest first; ``x``: yes."""
    yes = [[c == "x" for c in text] for text in (lacking, guaranteed)]
    return victims(*yes, lambda i: each, num_free)


def test_the_newest_have_to_go_until_the_others_have_what_they_lack() -> None:
    assert chosen("x....", ".....") == [4]
    assert chosen("xxxx.", ".....") == [4, 3]  # one lacks less, and has what the other needs
    assert chosen("xxxx.", ".....", num_free=3) == [4]
    assert chosen("xxxx.", ".....", num_free=4) == []
    assert chosen("x....", "....x") == [3]
    assert chosen("x....", ".xxxx") == [0], "it cannot go on, and others may be longer than it"
    assert chosen("xx", "xx") == []
    assert chosen("x", ".") == []
    assert chosen("xxx", "...", each=0) == [2, 1]


def test_nobody_starves_however_long_others_keep_coming() -> None:
    """Eight requests at any time, on blocks for two of them: each ends within a bounded number of
    steps, the oldest first or nearly so.
    """
    rng = random.Random(4)
    for slots in (0, 10, 200):
        rig = PressureRig(16, slots)
        since: dict[Request, int] = {}
        for turn in range(1500):
            while sum(not request.outcome for request in rig.requests) < 8:
                length = rng.randint(1, 40)
                since[rig.submit(prompt(rng.randrange(90), length), rng.randint(1, 24))] = turn
            rig.turn()
            rig.check()
            for request in [request for request in since if request.outcome]:
                del since[request]
            # Seven others of up to 24 tokens and 3 chunks, computed twice at most.
            assert max((turn - start for start in since.values()), default=0) <= 8 * 2 * 27
        assert len(rig.requests) > 100


def test_a_step_costs_by_what_runs_and_not_by_what_waits() -> None:
    """Four run on all the blocks there are; one, or sixty of the same kind, wait behind them."""
    costs = []
    for num_waiting in (1, 60):
        rig = PressureRig(20, growth_tokens=1, max_batch_tokens=64, prefix_cache=False)
        for i in range(4):
            rig.submit(prompt(i, 16), 5)
        for i in range(num_waiting):
            rig.submit(prompt(10 + i, 20), 3)
        for _ in range(4):
            rig.turn()
        running = [request for request in rig.requests if rig.state(request) is State.DECODING]
        assert len(running) == 4
        costs.append(calls_of(rig.turn))
        finish(rig)
    assert costs[0] == costs[1]


class PressureMachine(RuleBasedStateMachine):
    """Random arrivals, cancels and forced preemptions on tiny pools."""

    def __init__(self) -> None:
        super().__init__()
        # Steps that fail are reported with their tracebacks, which takes longer than all the rest.
        logging.disable(logging.ERROR)

    @initialize(
        num_blocks=st.integers(MAX_MODEL_LEN // 4, 24),
        slots=st.sampled_from([0, 3, 8, 60]),
        growth=st.sampled_from([1, 4, 32]),
        tokens=st.sampled_from([1, 5, 16, 64]),
        prefix_cache=st.booleans(),
        failing=st.one_of(st.none(), st.integers(0, 99)),
    )
    def start(
        self,
        num_blocks: int,
        slots: int,
        growth: int,
        tokens: int,
        prefix_cache: bool,
        failing: int | None,
    ) -> None:
        self.rig = PressureRig(
            num_blocks,
            slots,
            growth_tokens=growth,
            max_batch_tokens=tokens,
            prefix_cache=prefix_cache,
            fail=None if failing is None else random.Random(failing),
        )
        self.failing = failing is not None
        self.forced: set[Request] = set()

    @rule(
        first=st.integers(0, 3),
        length=st.integers(1, MAX_MODEL_LEN - 1),
        max_tokens=st.integers(1, MAX_MODEL_LEN),
    )
    def submit(self, first: int, length: int, max_tokens: int) -> None:
        self.rig.submit(prompt(first, length), min(max_tokens, MAX_MODEL_LEN - length))

    @rule(index=st.integers(0, 30))
    def cancel(self, index: int) -> None:
        if self.rig.requests:
            self.rig.cancel(self.rig.requests[index % len(self.rig.requests)])

    @rule(index=st.integers(0, 30), relief=st.sampled_from(Relief))
    def preempt(self, index: int, relief: Relief) -> None:
        if self.rig.requests:
            request = self.rig.requests[index % len(self.rig.requests)]
            self.forced.add(request)
            self.rig.preempt(request, relief)

    @rule(count=st.integers(1, 12))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.rig.turn()
            self.rig.check()

    @invariant()
    def work_is_bounded(self) -> None:
        for request in self.rig.requests:
            if request not in self.forced and not self.failing:
                assert request.given_back <= 1
                assert max(request.computed.values(), default=0) <= 1 + request.given_back

    def teardown(self) -> None:
        logging.disable(logging.NOTSET)
        rig = self.rig
        work = sum(len(r.prompt) + r.max_tokens for r in rig.requests if not r.outcome)
        rig.fail = None
        # Each turn computes a token at least, or moves blocks so that the next one does.
        finish(rig, within=20 + 6 * work)
        self.work_is_bounded()
        rig.check_end()
        assert {r.outcome for r in rig.requests} <= {"done", "cancelled"}


PressureMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestPressure = PressureMachine.TestCase
