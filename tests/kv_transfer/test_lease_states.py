"""Every state of a receiver's lease, and everything that may be asked of it there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from lease_table import MOVES, ONE, Leases, failed, key

from kvferry.kv_transfer.jobs import Reason, ReceiveClosed
from kvferry.kv_transfer.states import State
from kvferry.kv_transfer.verdicts import Answer

Ending = Callable[[Leases], None]


def _expire(leases: Leases) -> None:
    leases.clock.now = 110.0
    leases.table.expire()


ENDINGS: dict[str, tuple[Ending, object]] = {
    "release": (lambda leases: leases.table.release(ONE), ReceiveClosed(key(), ONE)),
    "deadline": (_expire, failed(Reason.DEADLINE)),
    "abort": (
        lambda leases: leases.table.abort(leases.link.source, key(), ONE, "why"),
        failed(Reason.ABORTED, "why"),
    ),
    "close": (lambda leases: leases.table.close(), failed(Reason.CLOSED)),
}


def reach(state: State) -> Leases:
    """A lease in a state."""
    leases = Leases()
    leases.expect()
    if state is not State.WAITING:
        leases.offer()
    match state:
        case State.COPYING | State.CLOSING | State.FAILING:
            leases.claim(0)
            if state is State.CLOSING:
                leases.table.release(ONE)
            if state is State.FAILING:
                _expire(leases)
        case State.DONE:
            for move in MOVES:
                leases.claim(move.index)
                leases.settle(move.index)
        case State.CLOSED:
            leases.table.release(ONE)
        case State.FAILED:
            _expire(leases)
    assert leases.state() is state
    return leases


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("how", ENDINGS)
def test_every_ending_is_legal_in_every_state(state: State, how: str) -> None:
    leases = reach(state)
    before = list(leases.events)
    act, event = ENDINGS[how]
    act(leases)
    if state.is_copying:
        assert leases.events == before == []
        assert leases.state() in (State.CLOSING, State.FAILING)
        act(leases)
        verdict = leases.settle(0)
        assert (verdict.answer, verdict.reason) == (Answer.ABORT, Reason.ENDED)
    assert len(leases.events) == 1
    if state.is_live:
        assert leases.events == [event]
    end = leases.state()
    assert end is not None
    assert end.is_ended
    act(leases)
    assert len(leases.events) == 1
    assert leases.state() is end
    assert leases.link.count <= 1


@pytest.mark.parametrize("state", State)
def test_offers_and_slabs_are_taken_or_answered_in_every_state(state: State) -> None:
    offers = {State.DONE: Answer.COMPLETE, State.CLOSING: Answer.ABORT, State.FAILING: Answer.ABORT}
    offers |= {State.CLOSED: Answer.ABORT, State.FAILED: Answer.ABORT}
    leases = reach(state)
    assert leases.offer().answer is offers.get(state, Answer.ACK)
    slabs = offers | {State.OFFERED: Answer.SCATTER, State.COPYING: Answer.WAIT}
    leases = reach(state)
    before = leases.state()
    # A slab before its offer is a defect of the sender and ends the lease.
    assert leases.claim(1) is slabs.get(state, Answer.ABORT)
    after = {State.WAITING: State.FAILED, State.OFFERED: State.COPYING}
    assert leases.state() is after.get(state, before)


@pytest.mark.parametrize("state", State)
def test_a_renewal_moves_the_deadline_of_a_lease_that_has_not_ended(state: State) -> None:
    leases = reach(state)
    before = leases.state()
    leases.table.renew(ONE, 120.0)
    assert leases.state() is before
    leases.clock.now = 119.9
    leases.table.expire()
    assert leases.state() is before
    leases.clock.now = 120.0
    leases.table.expire()
    after = {State.WAITING: State.FAILED, State.OFFERED: State.FAILED, State.COPYING: State.FAILING}
    assert leases.state() is after.get(state, before)
