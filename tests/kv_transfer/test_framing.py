"""Frames over a socket pair: every wait ends."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.transports.framing import FrameSocket, Wakeup


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, socket.socket]]:
    ours, theirs = socket.socketpair()
    frames = FrameSocket(ours, frame_timeout_s=0.2)
    yield frames, theirs
    frames.close()
    theirs.close()


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


def test_frames_arrive_whole_and_in_order(ends) -> None:
    frames, peer = ends
    peer.sendall(framed(b"one") + framed(b"two" * 1000) + framed(b"3")[:-1])
    assert frames.receive(1.0) == b"one"
    assert frames.receive(1.0) == b"two" * 1000
    assert frames.receive(0.01) is None
    peer.sendall(b"3")
    assert frames.receive(1.0) == b"3"


def test_nothing_beyond_the_frame_is_read(ends) -> None:
    frames, peer = ends
    peer.sendall(framed(b"one") + b"rest")
    frames.receive(1.0)
    assert frames.sock.recv(100) == b"rest"


def test_what_is_sent_is_framed(ends) -> None:
    frames, peer = ends
    frames.send(b"hello", 1.0)
    assert peer.recv(100) == framed(b"hello")


@pytest.mark.parametrize("length", [0, MAX_FRAME + 1, 2**30, 2**32 - 1])
def test_lengths_out_of_range_are_refused_before_any_byte_is_kept(ends, length: int) -> None:
    frames, peer = ends
    peer.sendall(struct.pack("!I", length))
    with pytest.raises(ProtocolError, match=str(length)):
        frames.receive(1.0)


def test_a_lower_limit_holds_for_its_call(ends) -> None:
    frames, peer = ends
    peer.sendall(framed(b"x" * 101))
    with pytest.raises(ProtocolError):
        frames.receive(1.0, limit=100)


def test_half_a_frame_loses_the_link(ends) -> None:
    frames, peer = ends
    peer.sendall(framed(b"hello")[:-1])
    started = time.monotonic()
    with pytest.raises(LinkLost, match="inside a message"):
        frames.receive(30.0)
    assert time.monotonic() - started < 10.0


def test_a_closed_peer_loses_the_link(ends) -> None:
    frames, peer = ends
    peer.close()
    with pytest.raises(LinkLost):
        frames.receive(1.0)
    with pytest.raises(LinkLost):
        frames.send(b"hello", 1.0)


def test_a_peer_that_takes_nothing_loses_the_link(ends) -> None:
    frames, _peer = ends
    with pytest.raises(LinkLost, match="takes no messages"):
        frames.send(b"x" * MAX_FRAME, 0.05)


def test_frames_above_the_limit_are_not_sent(ends) -> None:
    frames, _peer = ends
    with pytest.raises(ProtocolError):
        frames.send(b"x" * (MAX_FRAME + 1), 1.0)


def test_a_wake_ends_the_wait(ends) -> None:
    frames, _peer = ends
    timer = threading.Timer(0.05, frames.wake)
    timer.start()
    started = time.monotonic()
    assert frames.receive(30.0) is None
    assert time.monotonic() - started < 10.0
    timer.join()


def test_a_wake_beforehand_is_kept_and_one_after_close_is_harmless(ends) -> None:
    frames, _peer = ends
    frames.wake()
    assert frames.receive(30.0) is None
    assert frames.receive(0.01) is None
    frames.close()
    frames.wake()
    frames.close()


def test_a_wait_for_what_another_thread_has_closed_ends_at_once() -> None:
    wakeup = Wakeup()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wakeup.close()
        assert wakeup.wait_readable(ours, 20.0)


@pytest.fixture
def awake() -> Iterator[tuple[FrameSocket, socket.socket]]:
    """As ``ends``; never asleep while it has a processor to itself."""
    ours, theirs = socket.socketpair()
    frames = FrameSocket(ours, frame_timeout_s=0.2, awake_s=60.0)
    yield frames, theirs
    frames.close()
    theirs.close()


def test_who_is_awake_takes_what_comes(awake) -> None:
    frames, peer = awake
    threading.Timer(0.01, peer.sendall, [framed(b"one")]).start()
    assert frames.receive(60.0) == b"one"
    threading.Timer(0.01, frames.wake).start()
    assert frames.receive(60.0) is None
    peer.sendall(framed(b"two"))
    assert frames.receive(0.0) == b"two"


def test_who_is_awake_waits_no_longer_than_others(awake) -> None:
    frames, _ = awake
    started = time.monotonic()
    assert frames.receive(0.02) is None
    assert 0.02 <= time.monotonic() - started < 30.0


def test_who_is_awake_hears_that_the_peer_is_gone(awake) -> None:
    frames, peer = awake
    threading.Timer(0.01, peer.close).start()
    with pytest.raises(LinkLost, match="closed"):
        frames.receive(60.0)
