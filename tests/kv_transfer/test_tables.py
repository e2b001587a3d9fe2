"""The sender's table of transfers on a virtual clock: one terminal event each, never while a pack
runs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lease_table import Clock

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.kv_transfer.jobs import (
    BlockTable,
    Reason,
    SendAborted,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout, Span
from kvferry.kv_transfer.outgoing import Owed, TransferTable

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
        self.transfer = self.table.add(
            SendJob(
                key=key(),
                peer=Incarnation(2),
                endpoints=("loopback:x",),
                wire="float32",
                lease=LeaseId(1),
                target=LAYOUT,
                tokens=TOKENS,
                blocks=BLOCKS,
            ),
            OWED,
        )
        assert self.table.offer(self.transfer)


def test_an_attempt_is_not_sent_twice_at_once() -> None:
    transfers = Transfers()
    with pytest.raises(ValueError, match="being sent"):
        transfers.table.add(transfers.transfer.job, OWED)
    transfers.table.abort(key())
    transfers.table.add(transfers.transfer.job, OWED)


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
