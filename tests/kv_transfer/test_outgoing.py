"""The sender's transfers on a virtual clock: one terminal event each, never while a pack runs; what
is computed, cut and acknowledged of each.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lease_table import Clock

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import (
    BlockTable,
    Reason,
    SendAborted,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout, Shard
from kvferry.kv_transfer.outgoing import Owed, Progress, Transfer, TransferTable
from kvferry.kv_transfer.states import State

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
TOKENS = Span(3, 11)
BLOCKS = BlockTable(block_ids=np.arange(3, dtype=np.int32), generations=np.zeros(3, np.uint32))
OWED = Owed((LAYOUT.whole,), LAYOUT.head_bytes, 0.0)


def key(attempt: int = 1) -> AttemptKey:
    return AttemptKey(Incarnation(1), RequestId(1), attempt)


class Transfers:
    """A transfer table, its clock and what it said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[object] = []
        self.table = TransferTable(self.events.append, self.clock, progress_timeout_s=5.0)
        self.transfer = self.add()
        assert self.table.offer(self.transfer)

    def add(self, attempt: int = 1, rank: int = 0, owed: Owed = OWED) -> Transfer:
        job = SendJob(
            key=key(attempt),
            peer=Incarnation(2),
            endpoints=("loopback:x",),
            wire="float32",
            lease=LeaseId(1),
            target=LAYOUT,
            target_rank=rank,
            tokens=TOKENS,
            blocks=BLOCKS,
        )
        return self.table.add(job, owed)


def test_an_attempt_is_not_sent_twice_at_once() -> None:
    transfers = Transfers()
    with pytest.raises(ValueError, match="being sent"):
        transfers.table.add(transfers.transfer.job, OWED)
    transfers.table.abort(key())
    transfers.table.add(transfers.transfer.job, OWED)


def test_an_attempt_has_a_transfer_for_each_rank_of_the_receiver() -> None:
    """Each ends by itself, and an abort ends them all."""
    transfers = Transfers()
    others = [transfers.add(rank=rank) for rank in (1, 2)]
    stranger = transfers.add(attempt=2)
    assert transfers.table.of(key()) == [transfers.transfer, *others]
    transfers.table.fail(others[0], Reason.REFUSED)
    assert transfers.table.of(key()) == [transfers.transfer, others[1]]
    assert transfers.table.abort(key()) == [transfers.transfer, others[1]]
    assert transfers.table.of(key()) == []
    assert transfers.events == [SendFailed(key(), Reason.REFUSED), *[SendAborted(key())] * 2]
    assert transfers.table.of(key(2)) == [stranger]


def test_a_lost_link_is_forgotten_in_every_state_but_a_pack() -> None:
    transfers = Transfers()
    transfers.table.lost(transfers.transfer)
    assert transfers.transfer.state is State.WAITING
    assert transfers.table.offer(transfers.transfer)
    assert transfers.table.begin_pack(transfers.transfer)
    with pytest.raises(RuntimeError, match="lost in state COPYING"):
        transfers.table.lost(transfers.transfer)
    transfers.table.finish_pack(transfers.transfer)
    transfers.table.abort(key())
    transfers.table.lost(transfers.transfer)
    assert transfers.transfer.state is State.CLOSED
    assert not transfers.table.offer(transfers.transfer)


def test_what_is_lost_with_a_link_is_sent_again_and_nothing_else() -> None:
    transfer = Transfers().transfer
    transfer.report(Progress(2, TOKENS.end, None), 0.0)
    assert transfer.cut(LAYOUT.token_bytes, 0.0)
    assert list(transfer.unsent) == list(range(len(transfer.slabs)))
    transfer.unsent.clear()
    transfer.ack(1)
    transfer.ack(1)
    assert transfer.acked_nbytes == transfer.slabs[1].move.nbytes
    transfer.rewind()
    assert list(transfer.unsent) == [0, *range(2, len(transfer.slabs))]


@pytest.mark.parametrize(("least_bytes", "wakes"), [(0.0, 4), (inf, 1)])
def test_the_link_is_woken_for_what_may_be_sent(least_bytes: float, wakes: int) -> None:
    transfer = Transfers().add(attempt=2, owed=OWED._replace(least_bytes=least_bytes))
    reports = [(1, 7), (2, 7), (1, TOKENS.end), (2, TOKENS.end)]
    woken = [
        transfer.report(Progress(layers_end, tokens_end, None), 3.0)
        for layers_end, tokens_end in reports
    ]
    assert woken.count(True) == wakes
    assert woken[-1]
    assert transfer.computed_s == 3.0


def test_a_later_report_stands_for_those_that_were_not_looked_at() -> None:
    transfer = Transfers().transfer
    transfer.report(Progress(1, 7, "early"), 1.0)
    transfer.report(Progress(2, TOKENS.end, "late"), 2.0)
    assert transfer.cut(1 << 20, 5.0)
    assert [ready.after for ready in transfer.slabs] == ["late"]
    assert transfer.is_whole
    assert transfer.ready_s == 5.0
    assert not transfer.cut(1 << 20, 6.0)
    assert transfer.first_report == (Progress(1, 7, "early"), 1.0)


def test_several_parts_are_numbered_through() -> None:
    """Heads that other ranks send lie between this rank's."""
    parts = (Shard(Span(0, 2), Span(0, 1)), Shard(Span(0, 2), Span(2, 3)))
    transfer = Transfers().add(attempt=2, owed=OWED._replace(parts=parts))
    assert transfer.nbytes == 2 * TOKENS.length * LAYOUT.token_bytes
    for layers_end in (1, 2):
        transfer.report(Progress(layers_end, TOKENS.end, None), 0.0)
        transfer.cut(1 << 9, 0.0)
    moves = [ready.move for ready in transfer.slabs]
    assert [move.index for move in moves] == list(range(len(moves)))
    assert sum(move.nbytes for move in moves) == transfer.nbytes
    assert {move.heads for move in moves[: len(moves) // 2]} == {part.heads for part in parts}


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
