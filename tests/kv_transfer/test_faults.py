"""What goes wrong on the way: damage, loss, repetition, latecomers, blocks given away."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveDone,
    ReceiveFailed,
    SendDone,
    SendFailed,
)
from kvferry.kv_transfer.layout import Span
from kvferry.kv_transfer.messages import (
    MAX_FRAME,
    Ack,
    Header,
    Message,
    decode_to_receiver,
    decode_to_sender,
)
from kvferry.kv_transfer.receiver import KvReceiver

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

    def open_outlet(self, *arguments: Any) -> Any:
        self.outlet = self._channel.open_outlet(*arguments)
        return self.outlet

    def send(self, frame: bytes, timeout_s: float) -> None:
        for _ in range(self._outgoing(self, decode_to_receiver(frame))):
            self._channel.send(frame, timeout_s)

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        frame = self._channel.receive(timeout_s, limit)
        if frame is not None and not self._incoming(self, decode_to_sender(frame)):
            return None
        return frame


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


def assert_both_done(pair: Any) -> None:
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()
    pair.received.assert_none()
    pair.sent.assert_none()


def assert_both_failed(pair: Any, received: Reason, sent: Reason) -> None:
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, received)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, sent)
    pair.received.assert_none()
    pair.sent.assert_none()


def assert_works(pair: Any, **ids: int) -> None:
    """The next good transfer of the same pair succeeds."""
    pair.expect(**ids)
    pair.send(**ids)
    assert_both_done(pair)


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
    assert_both_done(pair)
    assert pair.receiver.counters == {Reason.DAMAGED: len(slabs)}


def test_lasting_damage_fails_the_attempt_on_both_sides(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda channel, message, _: flip(channel, message))))
    pair.expect()
    pair.send()
    assert_both_failed(pair, Reason.DAMAGED, Reason.DAMAGED)


def test_repeated_headers_change_nothing(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 3)))
    pair.expect()
    pair.send()
    assert_both_done(pair)
    assert set(pair.receiver.counters) == {Reason.DUPLICATE}


def test_a_lost_header_is_sent_once_more(make_pair) -> None:
    lose = on(Header, lambda _channel, _message, i: 0 if i == 1 else 1)
    pair = make_pair(wrap=tampered(lose), progress_timeout_s=0.3)
    pair.expect()
    pair.send()
    assert_both_done(pair)


def test_a_lost_acknowledgement_is_given_again(make_pair) -> None:
    lose = on(Ack, lambda _channel, _message, i: 0 if i == 1 else 1)
    pair = make_pair(wrap=tampered(incoming=lose), progress_timeout_s=0.3)
    pair.expect()
    pair.send()
    assert_both_done(pair)


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
    assert_both_done(pair)


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
    assert_both_done(pair)


class Giveaway:
    """A memory whose blocks are given away at some call."""

    def __init__(self, memory: Any, generations: Any, when: str) -> None:
        self._memory, self._generations, self._when = memory, generations, when
        self.layout, self.rank, self.digests = memory.layout, memory.rank, memory.digests

    def is_fresh(self, *arguments: Any) -> bool:
        return self._memory.is_fresh(*arguments)

    def pack(self, *arguments: Any) -> list[int]:
        return self._copy("pack", *arguments)

    def scatter(self, *arguments: Any) -> list[int]:
        return self._copy("scatter", *arguments)

    def _copy(self, name: str, *arguments: Any) -> list[int]:
        digests = getattr(self._memory, name)(*arguments)
        if self._when == "during":
            self._generations += 1
        return digests


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_block_given_away_on_the_sender_is_never_shipped(make_pair, when: str) -> None:
    pair = make_pair(
        wrap_source=lambda memory: Giveaway(memory, memory._generations, when),
        slab_bytes=1 << 16,
    )
    if when == "before":
        pair.source.generations += 1
    pair.expect()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.STALE)
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.ABORTED)
    assert not pair.target.slots.any()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_block_given_away_on_the_receiver_fails_the_lease(make_pair, when: str) -> None:
    pair = make_pair(wrap_target=lambda memory: Giveaway(memory, memory._generations, when))
    if when == "before":
        pair.target.generations += 1
    pair.expect()
    pair.send()
    assert_both_failed(pair, Reason.STALE, Reason.STALE)
    assert when == "during" or not pair.target.slots.any()


def test_a_stale_attempt_is_refused_and_the_live_one_unharmed(make_pair) -> None:
    pair = make_pair()
    pair.expect(attempt=2)
    pair.send(attempt=1)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.STALE)
    pair.received.assert_none()
    assert pair.receiver.counters == {Reason.STALE: 1}
    pair.send(attempt=2)
    assert_both_done(pair)


def test_an_unknown_lease_is_refused(make_pair) -> None:
    pair = make_pair()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.UNKNOWN)
    assert pair.receiver.counters == {Reason.UNKNOWN: 1}
    assert_works(pair, attempt=2)


def test_a_second_attempt_on_a_lease_in_use_is_refused(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 0)), progress_timeout_s=0.2)
    pair.expect()
    pair.send()
    pair.send(attempt=2)
    event = pair.sent.next()
    assert (event.key, event.reason) == (pair.key(attempt=2), Reason.STALE)
    assert pair.sent.next().key == pair.key()


def test_a_deadline_needs_no_traffic(make_pair) -> None:
    """B001."""
    pair = make_pair()
    pair.expect(deadline_s=time.monotonic() + 0.1)
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.DEADLINE)
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    assert_works(pair, lease=2, attempt=2)


def test_layouts_that_cannot_be_bridged_fail_before_a_link_is_opened(make_pair) -> None:
    pair = make_pair(target_layout={"num_layers": 4})
    pair.expect()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.MISMATCH)
    assert pair.sender.num_links == 0
    pair.received.assert_none()


def test_a_layout_that_was_announced_wrongly_is_found_by_the_lease(make_pair) -> None:
    pair = make_pair(target_layout={"num_layers": 4})
    pair.expect()
    pair.send(target=pair.source.layout)
    assert_both_failed(pair, Reason.MISMATCH, Reason.MISMATCH)


def test_other_content_than_expected_is_refused(make_pair) -> None:
    pair = make_pair()
    pair.expect(chain_hash=b"other")
    pair.send()
    assert_both_failed(pair, Reason.MISMATCH, Reason.MISMATCH)


def test_a_receiver_that_left_is_forgotten_and_its_successor_found(make_pair) -> None:
    """B006."""
    pair = make_pair()
    assert_works(pair)
    gone = pair.receiver.endpoints
    pair.receiver.close()
    pair.send(lease=2, attempt=2, endpoints=gone)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    pair.receiver = KvReceiver(
        pair.target.memory, pair.options, pair.received, [listen(gone[0].partition(":")[0])]
    )
    assert_works(pair, lease=3, attempt=3)
    assert pair.sender.num_links == 1


def test_closing_fails_what_is_live(make_pair) -> None:
    pair = make_pair(wrap=tampered(on(Header, lambda *_: 0)))
    pair.expect()
    pair.send()
    pair.sender.close()
    pair.receiver.close()
    assert_both_failed(pair, Reason.CLOSED, Reason.CLOSED)
    with pytest.raises(RuntimeError, match="closed"):
        pair.send()
    with pytest.raises(RuntimeError, match="closed"):
        pair.expect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_a_pack_leaves_no_job_without_an_end(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    pair.expect()
    pair.send(target=pair.target.layout, blocks=None)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.INTERNAL)
    assert_works(pair, lease=2, attempt=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_a_scatter_leaves_no_lease_without_an_end(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    short = pair.target.blocks
    short = type(short)(block_ids=short.block_ids[:1], generations=short.generations[:1])
    pair.expect(blocks=short)
    pair.send()
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.INTERNAL)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    assert_works(pair, lease=2, attempt=2)


def test_slabs_too_small_for_the_model_are_refused_at_start(make_pair) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.slab"):
        make_pair(slab_bytes=100)


def test_slabs_of_odd_size_work(make_pair) -> None:
    pair = make_pair(slab_bytes=1003)
    assert_works(pair)
