"""What goes wrong on the way: damage, loss, repetition, links that end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.span import Span
from kvferry.kv_transfer.frames import decode_to_receiver, decode_to_sender, split
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveFailed,
    SendFailed,
)
from kvferry.kv_transfer.messages import MAX_FRAME, Ack, Header, Message

pytestmark = pytest.mark.slow

Tamper = Callable[["TamperedChannel", Message], int]
"""(channel, message) -> how many times it passes."""


class TamperedChannel:
    """The sender's side of a link that a fault sits on."""

    def __init__(self, channel: Any, outgoing: Tamper, incoming: Tamper) -> None:
        self._channel = channel
        self._outgoing, self._incoming = outgoing, incoming
        self.wake, self.close = channel.wake, channel.close
        self.transport = channel.transport
        self.outlet: Any = None
        self._heard: deque[bytes] = deque()

    def open_outlet(self, *arguments: Any) -> Any:
        self.outlet = self._channel.open_outlet(*arguments)
        return self.outlet

    def send(self, frame: bytes, timeout_s: float) -> None:
        for one in split(frame):
            for _ in range(self._outgoing(self, decode_to_receiver(one))):
                self._channel.send(one, timeout_s)

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        if not self._heard:
            frame = self._channel.receive(timeout_s, limit)
            self._heard += [] if frame is None else split(frame)
        one = self._heard.popleft() if self._heard else None
        if one is not None and not self._incoming(self, decode_to_sender(one)):
            return None
        return one


def clean(_channel: TamperedChannel, _message: Message) -> int:
    return 1


def on(kind: type[Message], act: Callable[[TamperedChannel, Any, int], int]) -> Tamper:
    """Calls ``act`` with the number, from 0, of each message of a kind; the others pass."""
    count = 0

    def tamper(channel: TamperedChannel, message: Message) -> int:
        nonlocal count
        if not isinstance(message, kind):
            return 1
        count += 1
        return act(channel, message, count - 1)

    return tamper


def tampered(outgoing: Tamper = clean, incoming: Tamper = clean) -> Callable[[Any], Any]:
    return lambda channel: TamperedChannel(channel, outgoing, incoming)


def flip(channel: TamperedChannel, message: Header) -> int:
    """Damage the slab after its digest was taken."""
    channel.outlet.slab(message.slab)[message.header.nbytes // 2] ^= 0x10
    return 1


def flip_first(slabs: set[int]) -> Tamper:
    """Damage these slabs the first time that they are sent."""
    left = set(slabs)

    def act(channel: TamperedChannel, message: Header, _number: int) -> int:
        if message.header.index in left:
            left.remove(message.header.index)
            flip(channel, message)
        return 1

    return on(Header, act)


@pytest.mark.parametrize("slabs", [{0}, {3}, {0, 1, 2, 3, 4}], ids=str)
def test_damaged_slabs_are_sent_again(make_pair, slabs: set[int]) -> None:
    pair = make_pair(wrap=tampered(flip_first(slabs)))
    pair.expect()
    pair.send()
    pair.assert_both_done()
    assert pair.receiver.counters == {Reason.DAMAGED: len(slabs)}


def test_lasting_damage_fails_the_attempt_on_both_sides(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda channel, message, _: flip(channel, message))))
    pair.expect()
    pair.send()
    pair.assert_both_failed(Reason.DAMAGED, Reason.DAMAGED)


def test_repeated_headers_change_nothing(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 3)))
    pair.expect()
    pair.send()
    pair.assert_both_done()
    assert set(pair.receiver.counters) == {Reason.DUPLICATE}


def test_a_lost_header_is_sent_once_more(make_pair) -> None:
    lose = on(Header, lambda _channel, _message, i: 0 if i == 1 else 1)
    pair = make_pair(wrap=tampered(lose), progress_timeout_s=0.3)
    pair.expect()
    pair.send()
    pair.assert_both_done()


def test_a_lost_acknowledgement_is_given_again(make_pair) -> None:
    lose = on(Ack, lambda _channel, _message, i: 0 if i == 1 else 1)
    pair = make_pair(wrap=tampered(incoming=lose), progress_timeout_s=0.3)
    pair.expect()
    pair.send()
    pair.assert_both_done()


def test_headers_that_never_arrive_fail_the_attempt(make_pair) -> None:
    """B009."""
    # The sender gives up after two of these timeouts; the receiver the link, after three.
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 0)), progress_timeout_s=1.0)
    pair.expect()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.TIMEOUT)
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.ABORTED)


@pytest.mark.parametrize("kind", [Header, Ack])
@pytest.mark.parametrize("number", [0, 2])
def test_a_lost_link_is_opened_again_and_carries_on(make_pair, kind, number: int) -> None:
    def cut(channel: TamperedChannel, _message: Message, i: int) -> int:
        if i == number:
            channel.close()
        return i != number

    fault = on(kind, cut)
    pair = make_pair(wrap=tampered(fault, fault))
    pair.expect()
    pair.send()
    pair.assert_both_done()


def test_the_last_acknowledgement_lost_with_its_link_is_not_a_failure(make_pair) -> None:
    """All is verified at the receiver; the sender must learn that, not send the attempt again."""

    def cut(channel: TamperedChannel, message: Ack, _i: int) -> int:
        if message.index == 2:
            channel.close()
            return 0
        return 1

    pair = make_pair(wrap=tampered(incoming=on(Ack, cut)), tokens=Span(0, 100), slab_bytes=1 << 14)
    pair.expect()
    pair.send()
    pair.assert_both_done()


def test_a_second_attempt_on_a_lease_in_use_is_refused(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 0)), progress_timeout_s=0.2)
    pair.expect()
    pair.send()
    pair.send(attempt=2)
    event = pair.sent.next()
    assert (event.key, event.reason) == (pair.key(attempt=2), Reason.STALE)
    assert pair.sent.next().key == pair.key()


def test_closing_fails_what_is_live(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 0)))
    pair.expect()
    pair.send()
    pair.sender.close()
    pair.receiver.close()
    pair.assert_both_failed(Reason.CLOSED, Reason.CLOSED)
    with pytest.raises(RuntimeError, match="closed"):
        pair.send()
    with pytest.raises(RuntimeError, match="closed"):
        pair.expect()
