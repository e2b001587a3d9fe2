"""The receiver's lease table on a virtual clock: what it takes, what it refuses and counts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lease_table import (
    BLOCKS,
    MOVES,
    NBYTES,
    ONE,
    TOKENS,
    Leases,
    failed,
    key,
)

from kvferry.core.ids import LeaseId
from kvferry.core.span import Span
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.ended import ENDED_KEPT
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveFailed,
    ReceiveJob,
)
from kvferry.kv_transfer.verdicts import Answer, Outcome


@pytest.fixture
def leases() -> Leases:
    leases = Leases()
    leases.expect()
    return leases


@pytest.fixture
def offered(leases: Leases) -> Leases:
    assert leases.offer().answer is Answer.ACK
    return leases


def test_a_lease_is_done_after_its_last_slab(leases: Leases) -> None:
    leases.clock.now += 5.0  # while the prompt is computed
    assert leases.offer().answer is Answer.ACK
    leases.clock.now += 1.0
    assert leases.offer().answer is Answer.ACK
    leases.clock.now += 2.0
    for move in reversed(MOVES):
        assert not leases.events
        assert leases.claim(move.index) is Answer.SCATTER
        verdict = leases.settle(move.index)
        assert (verdict.answer, verdict.is_last) == (Answer.ACK, move is MOVES[0])
    account = Account(transport="loopback", nbytes=NBYTES, busy_s=0.5 * len(MOVES), wall_s=3.0)
    assert leases.events == [ReceiveDone(key(), ONE, account)]
    leases.table.release(ONE)
    assert len(leases.events) == 1
    assert leases.claim(0) is Answer.COMPLETE
    assert leases.offer().answer is Answer.COMPLETE
    assert leases.link.count == 0


def test_a_duplicate_is_acknowledged_and_counted_but_not_written(offered: Leases) -> None:
    offered.claim(0)
    offered.settle(0)
    assert offered.claim(0) is Answer.ACK
    assert offered.table.counters.dropped == {Reason.DUPLICATE: 1}


def test_damage_is_forgiven_once_per_slab(offered: Leases) -> None:
    for index in (0, 1):
        offered.claim(index)
        assert offered.settle(index, Outcome.DAMAGED).answer is Answer.RESEND
    offered.claim(0)
    assert offered.settle(0).answer is Answer.ACK
    offered.claim(1)
    assert offered.settle(1, Outcome.DAMAGED).answer is Answer.ABORT
    assert offered.events == [failed(Reason.DAMAGED)]
    counters = offered.table.counters
    assert counters.dropped == {Reason.DAMAGED: 3}
    assert counters.tallies == {Tally.RESEND: 2}


def test_of_two_endings_during_a_scatter_the_first_counts(offered: Leases) -> None:
    offered.claim(0)
    offered.table.release(ONE)
    offered.clock.now = 110.0
    offered.table.expire()
    offered.settle(0)
    assert offered.events == [ReceiveClosed(key(), ONE)]


def test_slabs_asked_for_again_are_counted_in_the_account(offered: Leases) -> None:
    offered.claim(0)
    offered.settle(0, Outcome.DAMAGED)
    for move in MOVES:
        offered.claim(move.index)
        offered.settle(move.index)
    (event,) = offered.events
    assert isinstance(event, ReceiveDone)
    # Bytes and seconds are of the same scatters, the one in vain included.
    assert event.account.resends == 1
    assert event.account.nbytes == NBYTES + MOVES[0].nbytes
    assert event.account.busy_s == 0.5 * (len(MOVES) + 1)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Outcome.STALE, Reason.STALE), (Outcome.BROKEN, Reason.INTERNAL)]
)
def test_a_scatter_that_did_not_go_well_fails_the_lease(offered: Leases, outcome, reason) -> None:
    offered.claim(0)
    assert offered.settle(0, outcome).answer is Answer.ABORT
    assert [event.reason for event in offered.events] == [reason]
    assert offered.table.counters.dropped == {reason: 1}


def test_other_attempts_are_stale_and_strangers_unknown(offered: Leases) -> None:
    assert offered.claim(0, attempt=2) is Answer.ABORT
    offered.table.abort(offered.link.source, key(2), ONE, "")
    assert offered.offer(attempt=0).reason is Reason.STALE
    assert offered.claim(0, lease=2) is Answer.ABORT
    assert offered.table.counters.dropped == {Reason.STALE: 2, Reason.UNKNOWN: 1}
    assert not offered.events
    assert offered.claim(0) is Answer.SCATTER


@pytest.mark.parametrize(
    "changes",
    [
        {"wire": "float16"},
        {"wire": ""},
        {"chain_hash": b"other"},
        {"tokens": Span(0, 2)},
        {"tokens": Span(3, 3)},
        {"tokens": Span(5, 3)},
        {"heads": Span(0, 3)},
        {"layers": Span(0, 2**40)},
        {"nbytes": 1},
    ],
    ids=str,
)
def test_a_slab_that_is_not_of_the_lease_fails_it(offered: Leases, changes: dict) -> None:
    assert offered.claim(0, **changes) is Answer.ABORT
    (event,) = offered.events
    assert isinstance(event, ReceiveFailed)
    assert event.reason is Reason.MISMATCH
    assert event.detail


def test_a_slab_that_overlaps_another_fails_it(offered: Leases) -> None:
    offered.claim(0)
    offered.settle(0)
    assert offered.claim(0, index=7) is Answer.ABORT
    assert [event.reason for event in offered.events] == [Reason.MISMATCH]


def test_a_live_lease_id_is_not_given_twice(leases: Leases) -> None:
    with pytest.raises(ValueError, match="live"):
        leases.expect(attempt=2)


def test_an_ended_lease_id_may_be_given_again(leases: Leases) -> None:
    leases.table.release(ONE)
    leases.expect(attempt=2)
    assert leases.offer(attempt=1).reason is Reason.STALE
    assert leases.offer(attempt=2).answer is Answer.ACK


def test_an_empty_range_is_done_at_once() -> None:
    leases = Leases()
    job = ReceiveJob(
        key=key(),
        lease=ONE,
        wire="float32",
        tokens=Span(4, 4),
        blocks=BLOCKS,
        deadline_s=110.0,
    )
    leases.table.expect(job)
    assert leases.events == [ReceiveDone(key(), ONE, Account())]


def test_a_wire_type_that_is_none_is_refused_at_once() -> None:
    job = ReceiveJob(
        key=key(), lease=ONE, wire="int3", tokens=TOKENS, blocks=BLOCKS, deadline_s=110.0
    )
    with pytest.raises(KeyError):
        Leases().table.expect(job)


def test_memory_of_ended_leases_is_bounded(leases: Leases) -> None:
    leases.table.release(ONE)
    for lease in range(2, ENDED_KEPT + 2):
        leases.expect(lease=lease)
        leases.table.release(LeaseId(lease))
    assert leases.offer().reason is Reason.UNKNOWN
    assert leases.state() is None
    assert leases.offer(lease=2).reason is Reason.ENDED


def test_counters_are_copies(leases: Leases) -> None:
    leases.table.counters.dropped[Reason.STALE] += 1
    leases.table.counters.tallies[Tally.GAP] += 1
    counters = leases.table.counters
    assert counters.dropped == counters.tallies == Counter()


ACTIONS = ["offer", "claim", "settle", "damage", "stale", "release", "abort", "tick", "renew"]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=40))
def test_any_order_ends_each_lease_once_and_never_during_a_scatter(steps) -> None:
    leases = Leases()
    leases.expect()
    claimed: int | None = None
    for action, number in steps:
        before = len(leases.events)
        match action:
            case "offer":
                leases.offer()
            case "claim" if leases.claim(number % len(MOVES)) is Answer.SCATTER:
                claimed = number % len(MOVES)
            case "settle" | "damage" | "stale" if claimed is not None:
                outcome = {"settle": Outcome.VERIFIED, "damage": Outcome.DAMAGED}
                leases.settle(claimed, outcome.get(action, Outcome.STALE))
                claimed = None
                continue
            case "release":
                leases.table.release(ONE)
            case "abort":
                leases.table.abort(leases.link.source, key(number), ONE, "")
            case "tick":
                leases.clock.now += number
                leases.table.expire()
            case "renew":
                leases.table.renew(ONE, leases.clock.now + number)
        assert claimed is None or len(leases.events) == before
    leases.table.release(ONE)
    if claimed is not None:
        assert not leases.events
        leases.settle(claimed)
    assert len(leases.events) == 1
