"""Transfers of several ranks are one: last words together, orders in order, blocks told first."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from group_fakes import (
    KEY,
    LEASE,
    NUM_LAYERS,
    FakeReceiver,
    FakeSender,
    Wire,
    account,
    receive_job,
    send_job,
)
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ProtocolError, RankLost
from kvferry.core.span import Span
from kvferry.kv_transfer.group.orders import (
    Abort,
    Answer,
    Blocks,
    Chunk,
    Done,
    Expected,
    Failed,
    GivenUp,
    Order,
    Release,
    decode_answer,
    encode,
)
from kvferry.kv_transfer.group.rank import ReceiverRank, SenderRank
from kvferry.kv_transfer.group.ranks import Ranks
from kvferry.kv_transfer.group.receiver import GroupReceiver
from kvferry.kv_transfer.group.sender import GroupSender
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveFailed,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
)

# Senders.


class SendingPair:
    """Rank 0 and one more."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.events: list[SendEvent] = []
        self.group = GroupSender(
            FakeSender,  # type: ignore[arg-type]
            Ranks(1, self.wire.send, self.wire.generations),
            self.events.append,
            NUM_LAYERS,
        )
        self.other = SenderRank(
            FakeSender,  # type: ignore[arg-type]
            NUM_LAYERS,
            np.zeros(16, np.uint32),
            self.group.answered,
        )
        self.wire.planes.append(self.other)

    def end(self, rank: int, event: SendEvent) -> None:
        sender: Any = (self.group.own, self.other.sender)[rank]
        sender.end(event)


def test_every_rank_sends_to_every_rank() -> None:
    pair = SendingPair()
    pair.group.begin([send_job(0), send_job(1)])
    assert pair.group.own.calls == pair.other.sender.calls == [("begin", 0), ("begin", 1)]
    for _ in range(2):
        pair.end(0, SendDone(KEY, account()))
    pair.end(1, SendDone(KEY, account()))
    assert pair.events == []
    pair.end(1, SendDone(KEY, account()))
    assert [type(event) for event in pair.events] == [SendDone]
    assert pair.events[0].account.nbytes == 40


def test_what_fails_on_one_rank_is_given_up_on_all_and_ends_once() -> None:
    pair = SendingPair()
    pair.group.begin([send_job()])
    pair.end(1, SendFailed(KEY, Reason.DAMAGED, "bits"))
    assert pair.events == []  # rank 0 may be packing still
    assert ("abort",) in pair.group.own.calls
    pair.end(0, SendAborted(KEY))
    assert pair.events == [SendFailed(KEY, Reason.DAMAGED, "bits")]


def test_layers_of_a_step_are_reported_by_each_rank_as_it_computes_them() -> None:
    pair = SendingPair()
    pair.group.begin([send_job()])
    chunk = Chunk(KEY, tokens_end=8, cached_end=4)
    own = pair.group.follow(11, [chunk])
    assert pair.other.layer_listener(10) is None
    other = pair.other.layer_listener(11)
    assert other is not None
    for layers in range(NUM_LAYERS + 1):
        own(layers, None)
        other(layers, None)
    pair.group.computed(KEY, NUM_LAYERS, 8)
    reports = [("computed", 3, 4), *(("computed", n, 8) for n in (1, 2, 3)), ("computed", 3, 8)]
    assert pair.group.own.calls[1:] == pair.other.sender.calls[1:] == reports
    assert pair.other.layer_listener(11) is None  # a step is run once


def test_an_abort_after_a_rank_was_lost_ends_this_rank_s_part() -> None:
    pair = SendingPair()
    pair.group.begin([send_job()])
    pair.wire.is_cut = True
    pair.group.abort(KEY)
    assert ("abort",) in pair.group.own.calls
    with pytest.raises(RankLost):
        pair.group.computed(KEY, NUM_LAYERS, 8)


# Receivers.


class ReceivingPair:
    def __init__(self) -> None:
        self.wire = Wire()
        self.events: list[Any] = []
        self.is_ready = 0
        self.group = GroupReceiver(
            FakeReceiver,  # type: ignore[arg-type]
            Ranks(1, self.wire.send, self.wire.generations),
            self.events.append,
            [("shm:1",)],
        )
        self.answers: list[bytes] = []
        self.other = ReceiverRank(
            FakeReceiver,  # type: ignore[arg-type]
            np.zeros(16, np.uint32),
            self.answers.append,
        )
        self.wire.planes.append(self.other)

    def ready(self) -> None:
        self.is_ready += 1

    def deliver(self) -> None:
        for payload in self.answers:
            self.group.answered(1, payload)
        self.answers.clear()

    def end(self, rank: int, event: Any) -> None:
        receiver: Any = (self.group.own, self.other.receiver)[rank]
        receiver.end(event)
        self.deliver()


def test_a_lease_is_granted_when_every_rank_would_take_slabs() -> None:
    pair = ReceivingPair()
    assert pair.group.endpoints == [("shm:0",), ("shm:1",)]
    pair.group.expect(receive_job(), pair.ready)
    assert pair.is_ready == 0
    pair.deliver()
    assert pair.is_ready == 1
    (call,) = pair.other.receiver.calls
    there = call[1]
    assert (there.key, there.lease, there.tokens, there.chain_hash) == (
        KEY,
        LEASE,
        Span(0, 8),
        b"chain",
    )
    np.testing.assert_array_equal(there.blocks.block_ids, [3, 5])


def test_a_worker_of_one_rank_is_ready_at_once() -> None:
    ready: list[bool] = []
    group = GroupReceiver(
        FakeReceiver,  # type: ignore[arg-type]
        Ranks(0, lambda payload: None, np.zeros(1, np.uint32)),
        lambda event: None,
    )
    group.expect(receive_job(), lambda: ready.append(True))
    assert ready == [True]


def test_kv_is_whole_when_every_rank_has_verified_its_part() -> None:
    pair = ReceivingPair()
    pair.group.expect(receive_job(), pair.ready)
    pair.deliver()
    pair.end(1, ReceiveDone(KEY, LEASE, account(5)))
    assert pair.events == []
    pair.end(0, ReceiveDone(KEY, LEASE, account(6)))
    assert [(e.lease, e.account.nbytes) for e in pair.events] == [(LEASE, 11)]
    assert pair.group.counters == {"damaged": 2}  # one on each


def test_a_part_that_fails_releases_the_others() -> None:
    pair = ReceivingPair()
    pair.group.expect(receive_job(), pair.ready)
    pair.deliver()
    pair.end(0, ReceiveFailed(KEY, LEASE, Reason.TIMEOUT))
    assert ("release",) in pair.other.receiver.calls
    assert pair.events == []
    pair.end(1, ReceiveClosed(KEY, LEASE))
    assert pair.events == [ReceiveFailed(KEY, LEASE, Reason.TIMEOUT)]


# Orders.


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(1, 5)), max_size=30), st.data())
def test_blocks_that_changed_hands_are_told_before_the_order(
    changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    wire = Wire()
    ranks = Ranks(1, wire.send, wire.generations)
    there = np.zeros(16, np.uint32)
    wire.planes.append(
        SenderRank(FakeSender, NUM_LAYERS, there, lambda payload: None)  # type: ignore[arg-type]
    )
    for block, times in changes:
        wire.generations[block] += times
        if data.draw(st.booleans()):
            ranks.tell(Abort(KEY))
            np.testing.assert_array_equal(there, wire.generations)
            assert isinstance(wire.sent[-1], Abort)
    told = [order for order in wire.sent if isinstance(order, Blocks)]
    assert all(len(order.block_ids) for order in told)
    assert not any(
        isinstance(a, Blocks) and isinstance(b, Blocks) for a, b in itertools.pairwise(wire.sent)
    )


@pytest.mark.parametrize(
    ("plane", "order"), [(SenderRank, Release(LEASE)), (ReceiverRank, Abort(KEY))]
)
def test_orders_for_the_other_direction_are_refused(plane: type[Any], order: Order) -> None:
    layers = (NUM_LAYERS,) if plane is SenderRank else ()
    fake = FakeSender if plane is SenderRank else FakeReceiver
    rank = plane(fake, *layers, np.zeros(1, np.uint32), lambda payload: None)
    with pytest.raises(ProtocolError, match="no order for a"):
        rank.handle(encode(order))


@pytest.mark.parametrize(
    "answer",
    [Expected(LEASE), Done(KEY, account(), LEASE), Failed(KEY, Reason.STALE), GivenUp(KEY)],
)
def test_answers_keep_their_values(answer: Answer) -> None:
    assert decode_answer(encode(answer)) == answer
