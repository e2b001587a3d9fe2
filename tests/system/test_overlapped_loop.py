"""What the step loop does while a device computes, and what it leaves alone until that is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_engine_model import expected
from hypothesis import given
from hypothesis import strategies as st
from overlap_rig import NUM_BLOCKS, Asked, Before, Rig, closing
from step_costs import instructions_of

from kvferry.engine.ports import SessionClosed
from kvferry.engine.sequences import State


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing() as made:
        yield made


PROMPT = list(range(10, 19))


def test_a_cancelled_sequence_is_left_alone_until_its_step_is_done(rig: Rig) -> None:
    rig.start(1, PROMPT)
    in_use = rig.sequences.pool.counts().in_use
    seen = []

    def cancel_it(plan: object) -> None:
        rig.cancel(1)
        seen.append(rig.state(1))

    rig.late.meanwhile = cancel_it
    rig.loop.turn()
    # Settled: the step has run, and the cancel has yet to be taken in.
    assert rig.state(1) is State.DECODING
    assert rig.sequences.pool.counts().in_use >= in_use
    rig.late.meanwhile = lambda plan: None
    rig.loop.turn()
    assert (seen, rig.state(1)) == ([State.DECODING], None)
    assert rig.sequences.pool.counts().in_use == 0


def test_messages_that_touch_nothing_of_the_step_are_taken_in_while_it_computes(rig: Rig) -> None:
    rig.start(1, PROMPT)
    seen = []

    def reserve_another(plan: object) -> None:
        rig.late.meanwhile = lambda plan: None
        rig.reserve(2, PROMPT[:5])
        rig.late.runner = Before(rig.late.runner, lambda: seen.append(rig.state(2)))

    rig.late.meanwhile = reserve_another
    rig.turn(1)
    assert seen == [State.WAITING], "before the step was done"


def test_a_step_that_is_done_waits_for_no_message(rig: Rig) -> None:
    with closing(polls=1) as quick:
        quick.start(1, PROMPT)
        seen = []
        first = quick.late.runner

        def reserve_two(plan: object) -> None:
            quick.reserve(2, PROMPT[:5])
            quick.reserve(3, PROMPT[:6])
            quick.late.runner = Before(first, lambda: seen.append((quick.state(2), quick.state(3))))

        quick.late.meanwhile = reserve_two
        quick.loop.turn()
        assert seen == [(State.WAITING, None)]


@pytest.mark.parametrize("first", ["cancel", "closed", "later attempt"])
def test_no_message_overtakes_one_that_has_to_wait(rig: Rig, first: str) -> None:
    rig.start(1, PROMPT)
    seen = []

    def both(plan: object) -> None:
        rig.late.meanwhile = lambda plan: None
        if first == "cancel":
            rig.cancel(1)
        elif first == "closed":
            rig.loop.post(SessionClosed(rig.outbox))
        else:
            rig.reserve(1, PROMPT, attempt=2)
        rig.reserve(2, PROMPT[:5])
        rig.late.runner = Before(rig.late.runner, lambda: seen.append((rig.state(1), rig.state(2))))

    rig.late.meanwhile = both
    rig.turn(1)
    assert seen == [(State.DECODING, None)]
    rig.turn(1)
    assert rig.state(1) is None
    assert (rig.state(2) is None) is (first == "closed")


def test_output_leaves_while_the_next_step_computes(rig: Rig) -> None:
    rig.start(1, PROMPT)
    rig.turn(1)
    at_launch, at_end = [], []
    rig.late.meanwhile = lambda plan: at_launch.append(rig.wakes)
    rig.late.runner = Before(rig.late.runner, lambda: at_end.append(rig.wakes))
    for _ in range(3):
        rig.loop.turn()
    # The writer is woken once per step: after the next one was launched, before it is done.
    assert [end - start for start, end in zip(at_launch, at_end, strict=True)] == [1, 1, 1]
    assert at_launch[1:] == at_end[:-1], "nothing competes with planning"


def test_what_the_last_step_said_leaves_when_no_other_follows(rig: Rig) -> None:
    rig.start(1, PROMPT)
    while len(rig.tokens(1)) < 9:
        rig.turn(1)
    before = rig.wakes
    assert not rig.loop.turn()
    assert rig.wakes == before + 1


def test_a_step_that_fails_in_flight_fails_whoever_was_in_it(rig: Rig) -> None:
    rig.start(1, PROMPT)

    def fail() -> None:
        raise RuntimeError("the device is on fire")

    rig.late.runner = Before(rig.late.runner, fail)
    rig.turn(2)
    failed = [message.failed.message for message in rig.said if message.HasField("failed")]
    assert len(failed) == 1
    assert "on fire" in failed[0]
    assert rig.sequences.pool.counts().in_use == 0


def test_a_step_costs_the_same_however_many_requests_wait() -> None:
    def instructions(num_waiting: int) -> int:
        with closing() as full:
            for number in (1, 2):
                full.start(number, [number] * 100)
            for number in range(10, 10 + num_waiting):
                full.reserve(number, [90] * 60)
            full.turn(2)
            assert full.loop.role.counts()[:2] == (2, num_waiting)
            return instructions_of(lambda: full.turn(3))

    assert instructions(900) == instructions(3)


ACTIONS = st.lists(
    st.lists(st.tuples(st.sampled_from(["begin", "cancel", "again", "renew"]), st.integers(0, 6))),
    min_size=1,
    max_size=25,
)


@given(ACTIONS, st.integers(0, 3), st.data())
def test_tokens_are_those_of_a_loop_that_waits(
    script: list[list[tuple[str, int]]], polls: int, data: st.DataObject
) -> None:
    """Requests come and go before, between and during steps; the fake model checks, as late as it
    can, that all KV that a step names is there.
    """
    with closing(polls) as rig:
        asked = Asked(rig)
        for actions in script:
            split = data.draw(st.integers(0, len(actions)))
            for action in actions[:split]:
                asked.do(*action)
            late = iter(actions[split:])
            rig.late.meanwhile = lambda plan, late=late: [asked.do(*a) for a in late] and None
            rig.turn(1)
            asked.answer()
        rig.late.meanwhile = lambda plan: None
        for _ in range(200):
            rig.turn(1)
            asked.answer()
        assert "failed" not in rig.kinds()
        for number, attempt in asked.wanted.items():
            assert rig.state(number, attempt) is None
            assert asked.output(number, attempt) == expected(asked.prompt(number), 9)
        counts = rig.sequences.pool.counts()
        assert counts.free + counts.cached == counts.total == NUM_BLOCKS
