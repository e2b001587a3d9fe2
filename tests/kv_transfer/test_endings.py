"""Abort and release at each state: one event, and never while a copy runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from unfollowed import Unfollowed

from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveFailed,
    SendAborted,
    SendDone,
    SendFailed,
)

WAIT_S = 20.0


class Gate:
    """A point where a thread stops until it is let through."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop_here(self) -> None:
        self._reached.set()
        assert self._open.wait(WAIT_S)

    def wait_reached(self) -> None:
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


class GatedMemory(Unfollowed):
    """A memory whose copies stop at a gate."""

    def __init__(self, memory: Any, gate: Gate) -> None:
        self._memory, self._gate = memory, gate
        self.layout, self.is_fresh = memory.layout, memory.is_fresh
        self.rank, self.digests = memory.rank, memory.digests

    def pack(self, *arguments: Any) -> list[int]:
        self._gate.stop_here()
        return self._memory.pack(*arguments)

    def scatter(self, *arguments: Any) -> list[int]:
        self._gate.stop_here()
        return self._memory.scatter(*arguments)


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.open()


def test_abort_before_the_link_is_open(make_pair, gate: Gate) -> None:
    def held(channel: Any) -> Any:
        gate.stop_here()
        return channel

    pair = make_pair(wrap=held)
    pair.expect()
    pair.send()
    gate.wait_reached()
    pair.sender.abort(pair.key())
    assert pair.sent.next() == SendAborted(pair.key())
    gate.open()
    assert isinstance(pair.received.next(), ReceiveFailed)
    pair.sent.assert_none()


def test_abort_during_a_pack_waits_for_it(make_pair, gate: Gate) -> None:
    pair = make_pair(wrap_source=lambda memory: GatedMemory(memory, gate))
    pair.expect()
    pair.send()
    gate.wait_reached()
    pair.sender.abort(pair.key())
    pair.sender.abort(pair.key())
    pair.sent.assert_none()
    gate.open()
    assert pair.sent.next() == SendAborted(pair.key())
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.ABORTED)
    pair.sent.assert_none()
    assert not pair.target.slots.any()


def test_abort_while_slabs_wait_at_the_receiver(make_pair, gate: Gate) -> None:
    pair = make_pair(wrap_target=lambda memory: GatedMemory(memory, gate))
    pair.expect()
    pair.send()
    gate.wait_reached()
    pair.sender.abort(pair.key())
    assert pair.sent.next() == SendAborted(pair.key())
    pair.received.assert_none()
    gate.open()
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.ABORTED)
    pair.sent.assert_none()


def test_abort_while_waiting_for_a_credit(make_pair, gate: Gate) -> None:
    """All slab memory is held up by another request's scatter."""
    pair = make_pair(
        wrap_target=lambda memory: GatedMemory(memory, gate), staging_bytes=8192, slab_bytes=8192
    )
    for number in (1, 2):
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        gate.wait_reached()
    pair.sender.abort(pair.key(request=2))
    assert pair.sent.next() == SendAborted(pair.key(request=2))
    gate.open()
    events = {type(event): event.key for event in (pair.received.next(), pair.received.next())}
    assert events == {ReceiveFailed: pair.key(request=2), ReceiveDone: pair.key(request=1)}
    assert pair.sent.next().key == pair.key(request=1)


def test_abort_after_the_end_and_of_a_stranger_is_nothing(make_pair) -> None:
    pair = make_pair()
    pair.sender.abort(pair.key())
    pair.expect()
    pair.send()
    assert isinstance(pair.sent.next(), SendDone)
    pair.sender.abort(pair.key())
    pair.sent.assert_none()


def test_release_before_any_slab_then_latecomers_are_refused(make_pair) -> None:
    pair = make_pair()
    pair.expect()
    pair.receiver.release(1)
    pair.receiver.release(1)
    assert pair.received.next() == ReceiveClosed(pair.key(), 1)
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    pair.received.assert_none()
    assert pair.receiver.counters == {Reason.ENDED: 1}
    assert not pair.target.slots.any()


def test_release_during_a_scatter_waits_for_it(make_pair, gate: Gate) -> None:
    pair = make_pair(wrap_target=lambda memory: GatedMemory(memory, gate))
    pair.expect()
    pair.send()
    gate.wait_reached()
    pair.receiver.release(1)
    pair.received.assert_none()
    gate.open()
    assert pair.received.next() == ReceiveClosed(pair.key(), 1)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    pair.received.assert_none()
    written = pair.target.read(*pair.tokens).any(dim=-1).sum()
    assert written < pair.tokens.length * 3 * 2 * 2


def test_release_after_the_end_is_nothing(make_pair) -> None:
    pair = make_pair()
    pair.expect()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    pair.receiver.release(1)
    pair.received.assert_none()


def test_closing_ends_all_leases_though_a_scatter_does_not_return(make_pair, gate: Gate) -> None:
    pair = make_pair(wrap_target=lambda memory: GatedMemory(memory, gate))
    for number in (1, 2):
        pair.expect(lease=number, request=number)
    pair.send()
    gate.wait_reached()
    with pytest.raises(TimeoutError, match="kv-receiver-link"):
        pair.receiver.close(timeout_s=0.05)
    assert pair.received.next() == ReceiveFailed(pair.key(request=2), 2, Reason.CLOSED)
    pair.received.assert_none()
    gate.open()
    assert pair.received.next() == ReceiveFailed(pair.key(), 1, Reason.CLOSED)
