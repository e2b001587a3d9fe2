"""What an inlet takes from a data stream: what was granted, once, and nothing else."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest
from strangers import is_closed_by_peer
from tcp_link import FRAME, SLAB, SLABS, TcpLink, eventually, has_arrived

from kvferry.core.errors import LinkLost


@pytest.fixture
def raw() -> Iterator[TcpLink]:
    link = TcpLink().open_raw()
    yield link
    link.close()


@pytest.mark.parametrize(
    "header",
    [
        FRAME.pack(1, 1, 100),  # a slab that was not granted
        FRAME.pack(2, 0, 100),  # a grant that was not given
        FRAME.pack(1, SLABS, 100),
        FRAME.pack(1, 2**32 - 1, 100),
        FRAME.pack(1, 0, 0),
        FRAME.pack(1, 0, SLAB + 1),
        FRAME.pack(1, 0, 2**63),
        FRAME.pack(2**64 - 1, 0, 100),
        b"\xff" * FRAME.size,
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[: FRAME.size],
    ],
)
def test_what_was_not_granted_breaks_the_path(raw: TcpLink, header: bytes) -> None:
    raw.inlet.grant(0, 1)
    with raw.stream() as stream:
        stream.sendall(header + b"x" * 100)
        eventually(lambda: is_broken(raw))
        assert is_closed_by_peer(stream)
    assert not any(any(raw.inlet.slab(slab)) for slab in range(SLABS))
    assert raw.receiver.receive(0.0) is None  # the control channel is the link's to close


def is_broken(link: TcpLink) -> bool:
    try:
        link.inlet.arrived(0, 1, 100)
    except LinkLost:
        return True
    return False


def test_other_bytes_than_announced_break_the_path(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, 100) + b"x" * 100)
        eventually(has_arrived(raw, 0, 1, 100))
        with pytest.raises(LinkLost, match="100 bytes instead of 99"):
            raw.inlet.arrived(0, 1, 99)


def test_a_path_cut_short_is_broken_and_wakes_the_link(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, 100) + b"x" * 50)
    eventually(raw.inlet.events)
    while raw.inlet.events():
        assert raw.receiver.receive(20.0) is None
    with pytest.raises(LinkLost, match="closed a stream"):
        raw.inlet.arrived(0, 1, 100)


def test_a_stream_that_cannot_be_served_breaks_the_path(raw: TcpLink) -> None:
    dead = socket.socket()
    raw.inlet.attach(dead)  # not connected: as when the peer has gone meanwhile
    while not is_broken(raw):
        assert raw.receiver.receive(20.0) is None
    assert dead.fileno() == -1


def test_late_bytes_of_an_older_grant_are_dropped(raw: TcpLink) -> None:
    """Its sender gave the grant back when its own kernel had the bytes."""
    raw.inlet.grant(0, 1)
    raw.inlet.grant(0, 2)
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, SLAB) + b"x" * SLAB)
        stream.sendall(FRAME.pack(2, 0, 100) + b"y" * 100)
        eventually(has_arrived(raw, 0, 2, 100))
        assert not raw.inlet.arrived(0, 1, 100)
    assert bytes(raw.inlet.slab(0)[:101]) == b"y" * 100 + b"\0"


def test_bytes_in_arrival_when_the_slab_is_granted_anew_stay_out_of_it(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    raw.inlet.grant(1, 2)
    with raw.stream() as one, raw.stream() as other:
        one.sendall(FRAME.pack(1, 0, 100) + b"x" * 50)
        eventually(lambda: raw.inlet.arrived(0, 1, 100) or raw.inlet.slab(0)[49])
        raw.inlet.grant(0, 3)
        other.sendall(FRAME.pack(3, 0, 100) + b"y" * 100)
        eventually(has_arrived(raw, 0, 3, 100))
        one.sendall(b"x" * 50 + FRAME.pack(2, 1, 1) + b"z")
        eventually(has_arrived(raw, 1, 2, 1))
    assert bytes(raw.inlet.slab(0)[:100]) == b"y" * 100


def test_a_grant_is_good_for_one_slab(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    raw.inlet.grant(1, 2)
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, 100) + b"x" * 100)
        stream.sendall(FRAME.pack(1, 0, 100) + b"y" * 100)
        stream.sendall(FRAME.pack(2, 1, 1) + b"z")
        eventually(has_arrived(raw, 1, 2, 1))
    assert bytes(raw.inlet.slab(0)[:100]) == b"x" * 100


def test_an_inlet_closes_while_bytes_arrive(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, 100) + b"x" * 50)
        eventually(lambda: raw.inlet.arrived(0, 1, 100) or raw.inlet.slab(0)[49])
        raw.inlet.close()
        assert is_closed_by_peer(stream)


def test_a_stream_that_joins_a_broken_path_is_closed_with_it(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    with raw.stream() as bad, raw.stream() as late:
        bad.sendall(FRAME.pack(2, 0, 100))
        eventually(lambda: is_broken(raw))
        raw.inlet.close()
        assert is_closed_by_peer(late)


def test_what_is_coming_can_be_followed_by_who_knows_it(raw: TcpLink) -> None:
    raw.inlet.grant(0, 1)
    assert raw.inlet.progress(0, 1, 100) is None
    with raw.stream() as stream:
        stream.sendall(FRAME.pack(1, 0, 100) + b"x" * 50)
        eventually(lambda: raw.inlet.progress(0, 1, 100))
        assert raw.inlet.progress(0, 2, 100) is None
        assert raw.inlet.progress(0, 1, 99) is None
        assert raw.inlet.progress(1, 1, 100) is None
        coming = raw.inlet.progress(0, 1, 100)
        assert coming is not None
        eventually(lambda: raw.inlet.arrived(0, 1, 100) or coming.moved == 50)
        stream.sendall(b"y" * 50 + FRAME.pack(1, 0, 1) + b"z")
        raw.inlet.slab(0)[50:100] = take(coming.fd, 50)
        coming.moved = 100
        assert raw.inlet.arrived(0, 1, 100)
        assert raw.inlet.progress(0, 1, 100) is None
    assert bytes(raw.inlet.slab(0)[:101]) == b"x" * 50 + b"y" * 50 + b"\0"


def take(fd: int, nbytes: int) -> bytes:
    taken = b""
    while len(taken) < nbytes:
        try:
            taken += os.read(fd, nbytes - len(taken))
        except BlockingIOError:
            time.sleep(0.001)
    return taken
