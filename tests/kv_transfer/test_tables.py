"""The two state machines, on a virtual clock: one terminal event each, never while a copy runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.kv_transfer.jobs import (
    BlockTable,
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveFailed,
    ReceiveJob,
    SendAborted,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.leases import ENDED_KEPT, LeaseTable
from kvferry.kv_transfer.messages import SlabHeader
from kvferry.kv_transfer.outgoing import TransferTable
from kvferry.kv_transfer.plan import Span, plan_slabs
from kvferry.kv_transfer.verdicts import Answer, Outcome

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
TOKENS = Span(3, 11)
MOVES = plan_slabs(LAYOUT, LAYOUT, TOKENS, LAYOUT.token_bytes * 2)
BLOCKS = BlockTable(block_ids=np.arange(3, dtype=np.int32), generations=np.zeros(3, np.uint32))


def key(attempt: int = 1) -> AttemptKey:
    return AttemptKey(Incarnation(1), RequestId(1), attempt)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def header(index: int, attempt: int = 1, **changes: object) -> SlabHeader:
    move = MOVES[index]
    values = {
        "key": key(attempt),
        "lease": 1,
        "index": index,
        "count": len(MOVES),
        "layers": move.layers,
        "heads": move.heads,
        "tokens": move.tokens,
        "flavour": "float32",
        "chain_hash": b"h",
        "nbytes": move.nbytes,
        "digests": [0],
    }
    return SlabHeader(**(values | changes))


class Leases:
    """A lease table, its clock and what it said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[object] = []
        self.table = LeaseTable(LAYOUT, self.events.append, self.clock)

    def expect(self, attempt: int = 1, lease: int = 1) -> None:
        self.table.expect(
            ReceiveJob(
                key=key(attempt),
                lease=LeaseId(lease),
                tokens=TOKENS,
                blocks=BLOCKS,
                deadline_s=110.0,
                chain_hash=b"h",
            )
        )

    def claim(self, index: int, **changes: object) -> Answer:
        return self.table.claim(header(index, **changes), 0.0).answer

    def settle(self, index: int, outcome: Outcome = Outcome.VERIFIED) -> Answer:
        return self.table.settle(header(index), outcome, 0.5).answer


@pytest.fixture
def leases() -> Leases:
    leases = Leases()
    leases.expect()
    return leases


def test_a_lease_is_done_after_its_last_slab(leases: Leases) -> None:
    leases.clock.now += 100.0  # while the prompt is computed
    nbytes = TOKENS.length * LAYOUT.token_bytes
    assert leases.table.offered(key(), LeaseId(1), nbytes).answer is Answer.ACK
    leases.clock.now += 3.0
    for move in reversed(MOVES):
        assert not leases.events
        assert leases.claim(move.index) is Answer.SCATTER
        assert leases.settle(move.index) is Answer.ACK
    assert leases.events == [ReceiveDone(key(), LeaseId(1), nbytes, 0.5 * len(MOVES), 3.0)]
    leases.table.release(LeaseId(1))
    assert len(leases.events) == 1
    assert leases.claim(0) is Answer.COMPLETE
    assert leases.table.offered(key(), LeaseId(1)).answer is Answer.COMPLETE


def test_a_duplicate_is_acknowledged_and_counted_but_not_written(leases: Leases) -> None:
    leases.claim(0)
    leases.settle(0)
    assert leases.claim(0) is Answer.ACK
    assert leases.table.counters == {Reason.DUPLICATE: 1}


def test_damage_is_forgiven_once_per_slab(leases: Leases) -> None:
    for index in (0, 1):
        leases.claim(index)
        assert leases.settle(index, Outcome.DAMAGED) is Answer.RESEND
    leases.claim(0)
    assert leases.settle(0) is Answer.ACK
    leases.claim(1)
    assert leases.settle(1, Outcome.DAMAGED) is Answer.ABORT
    assert leases.events == [ReceiveFailed(key(), LeaseId(1), Reason.DAMAGED)]
    assert leases.table.counters == {Reason.DAMAGED: 3}


@pytest.mark.parametrize("scattering", [False, True])
@pytest.mark.parametrize("how", ["release", "deadline", "abort", "close"])
def test_an_end_waits_for_the_scatter(leases: Leases, how: str, scattering: bool) -> None:
    if scattering:
        leases.claim(0)
    match how:
        case "release":
            leases.table.release(LeaseId(1))
        case "deadline":
            leases.clock.now = 110.0
            leases.table.expire()
        case "abort":
            leases.table.fail(key(), LeaseId(1), Reason.ABORTED, "")
        case "close":
            assert leases.table.close(0.0) is not scattering
    if scattering:
        assert not leases.events
        leases.table.release(LeaseId(1))
        assert leases.settle(0) is Answer.ABORT
    reason = {"deadline": Reason.DEADLINE, "abort": Reason.ABORTED, "close": Reason.CLOSED}
    expected = (
        ReceiveClosed(key(), LeaseId(1))
        if how == "release"
        else ReceiveFailed(key(), LeaseId(1), reason[how])
    )
    assert leases.events == [expected]
    assert leases.claim(1) is Answer.ABORT
    assert leases.table.counters[Reason.ENDED] >= 1


def test_a_deadline_moves_with_its_renewal(leases: Leases) -> None:
    leases.table.renew(LeaseId(1), 120.0)
    leases.clock.now = 119.0
    leases.table.expire()
    assert not leases.events
    leases.clock.now = 120.0
    leases.table.expire()
    leases.table.renew(LeaseId(1), 130.0)
    assert leases.events == [ReceiveFailed(key(), LeaseId(1), Reason.DEADLINE)]


def test_other_attempts_are_stale_and_strangers_unknown(leases: Leases) -> None:
    assert leases.claim(0, attempt=2) is Answer.ABORT
    leases.table.fail(key(2), LeaseId(1), Reason.ABORTED, "")
    assert leases.table.offered(key(0), LeaseId(1)).reason is Reason.STALE
    assert leases.claim(0, lease=2) is Answer.ABORT
    assert leases.table.counters == {Reason.STALE: 2, Reason.UNKNOWN: 1}
    assert not leases.events
    assert leases.claim(0) is Answer.SCATTER


@pytest.mark.parametrize(
    "changes",
    [
        {"flavour": "float16"},
        {"chain_hash": b"other"},
        {"count": 0},
        {"digests": []},
        {"digests": [0, 0]},
        {"tokens": Span(0, 2)},
        {"tokens": Span(3, 3)},
        {"layers": Span(0, 2**40)},
        {"nbytes": 1},
    ],
    ids=str,
)
def test_a_slab_that_is_not_of_the_lease_fails_it(leases: Leases, changes: dict) -> None:
    assert leases.claim(0, **changes) is Answer.ABORT
    (event,) = leases.events
    assert isinstance(event, ReceiveFailed)
    assert event.reason is Reason.MISMATCH
    assert event.detail


def test_a_live_lease_id_is_not_given_twice(leases: Leases) -> None:
    with pytest.raises(ValueError, match="live"):
        leases.expect(attempt=2)


def test_an_empty_range_is_done_at_once() -> None:
    leases = Leases()
    job = ReceiveJob(
        key=key(), lease=LeaseId(1), tokens=Span(4, 4), blocks=BLOCKS, deadline_s=110.0
    )
    leases.table.expect(job)
    assert leases.events == [ReceiveDone(key(), LeaseId(1), 0, 0.0, 0.0)]


def test_memory_of_ended_leases_is_bounded(leases: Leases) -> None:
    leases.table.release(LeaseId(1))
    for lease in range(2, ENDED_KEPT + 2):
        leases.expect(lease=lease)
        leases.table.release(LeaseId(lease))
    assert leases.table.offered(key(), LeaseId(1)).reason is Reason.UNKNOWN
    assert leases.table.offered(key(), LeaseId(2)).reason is Reason.ENDED


ACTIONS = ["claim", "settle", "damage", "stale", "release", "fail", "tick", "renew"]


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3)), max_size=40))
def test_any_order_ends_each_lease_once_and_never_during_a_scatter(steps) -> None:
    leases = Leases()
    leases.expect()
    claimed: int | None = None
    for action, number in steps:
        before = len(leases.events)
        match action:
            case "claim" if leases.claim(number % len(MOVES)) is Answer.SCATTER:
                claimed = number % len(MOVES)
            case "settle" | "damage" | "stale" if claimed is not None:
                outcome = {"settle": Outcome.VERIFIED, "damage": Outcome.DAMAGED}
                leases.settle(claimed, outcome.get(action, Outcome.STALE))
                claimed = None
                continue
            case "release":
                leases.table.release(LeaseId(1))
            case "fail":
                leases.table.fail(key(number), LeaseId(1), Reason.ABORTED, "")
            case "tick":
                leases.clock.now += number
                leases.table.expire()
            case "renew":
                leases.table.renew(LeaseId(1), leases.clock.now + number)
        assert claimed is None or len(leases.events) == before
    leases.table.release(LeaseId(1))
    if claimed is not None:
        assert not leases.events
        leases.settle(claimed)
    assert len(leases.events) == 1


class Transfers:
    """A transfer table, its clock and what it said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[object] = []
        self.table = TransferTable(self.events.append, self.clock, progress_timeout_s=5.0)
        self.transfer = self.table.add(
            SendJob(
                key=key(),
                endpoint="loopback:x",
                lease=LeaseId(1),
                target=LAYOUT,
                tokens=TOKENS,
                blocks=BLOCKS,
            )
        )


def test_an_attempt_is_not_sent_twice_at_once() -> None:
    transfers = Transfers()
    with pytest.raises(ValueError, match="being sent"):
        transfers.table.add(transfers.transfer.job)
    transfers.table.abort(key())
    transfers.table.add(transfers.transfer.job)


def test_abort_waits_for_the_pack_and_is_idempotent() -> None:
    transfers = Transfers()
    assert transfers.table.begin_pack(transfers.transfer)
    transfers.table.abort(key())
    transfers.table.abort(key())
    assert not transfers.events
    assert not transfers.table.finish_pack(transfers.transfer)
    assert not transfers.table.begin_pack(transfers.transfer)
    transfers.table.abort(key())
    transfers.table.fail(transfers.transfer, Reason.TIMEOUT)
    transfers.table.succeed(transfers.transfer)
    assert transfers.events == [SendAborted(key())]


def test_abort_of_a_stranger_is_nothing() -> None:
    transfers = Transfers()
    transfers.table.abort(key(2))
    assert not transfers.events


def test_a_transfer_is_overdue_after_the_timeout_without_a_move() -> None:
    transfers = Transfers()
    transfers.clock.now += 4.0
    transfers.table.moved(transfers.transfer)
    transfers.clock.now += 4.0
    assert not transfers.table.is_overdue(transfers.transfer)
    assert transfers.table.overdue_in_s(transfers.transfer) == 1.0
    transfers.clock.now += 1.0
    assert transfers.table.is_overdue(transfers.transfer)


@given(st.lists(st.sampled_from(["begin", "finish", "abort", "fail", "succeed"]), max_size=20))
def test_any_order_ends_each_transfer_once_and_never_during_a_pack(steps) -> None:
    transfers = Transfers()
    packing = False
    for step in steps:
        before = len(transfers.events)
        match step:
            case "begin" if not packing:
                packing = transfers.table.begin_pack(transfers.transfer)
            case "finish" if packing:
                packing = False
                transfers.table.finish_pack(transfers.transfer)
                continue
            case "abort":
                transfers.table.abort(key())
            case "fail" if not packing:
                transfers.table.fail(transfers.transfer, Reason.STALE)
            case "succeed" if not packing:
                transfers.table.succeed(transfers.transfer)
        assert not packing or len(transfers.events) == before
    transfers.table.abort(key())
    if packing:
        transfers.table.finish_pack(transfers.transfer)
    (event,) = transfers.events
    assert isinstance(event, SendAborted | SendFailed | SendDone)
