"""Slabs over TCP: only what was granted lands, every thread ends, and one port is enough."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from followed import LARGE, assert_followed
from strangers import is_closed_by_peer, open_socket
from tcp_link import FRAME, SLAB, SLABS, TcpLink, eventually, has_arrived

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.kernels.kv_pack.host_compiled import compiled_pack
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.jobs import ReceiveDone, SendDone
from kvferry.kv_transfer.transports.tcp import TcpChannel
from kvferry.kv_transfer.transports.tcp_listener import CONTROL, DATA, MAX_STRANGERS, TcpListener


@pytest.fixture
def made() -> Iterator[Callable[..., TcpLink]]:
    links: list[TcpLink] = []

    def make(**options: Any) -> TcpLink:
        links.append(TcpLink(**options))
        return links[-1]

    yield make
    for link in links:
        link.close()


@pytest.fixture
def link(made: Callable[..., TcpLink]) -> TcpLink:
    return made().open()


@pytest.fixture
def raw(made: Callable[..., TcpLink]) -> TcpLink:
    return made().open_raw()


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_slabs_arrive_whole_whatever_their_order(made, streams: int) -> None:
    link = made(streams=streams).open()
    for grant in range(1, 41):
        slab, nbytes = grant % SLABS, 1 + grant * 1601
        eventually(lambda slab=slab: not link.outlet.in_flight(slab))
        link.inlet.grant(slab, grant)
        content = os.urandom(nbytes)
        link.outlet.slab(slab)[:nbytes] = content
        link.outlet.push(slab, grant, nbytes)
        if grant % SLABS == 0:
            eventually(has_arrived(link, slab, grant, nbytes))
            assert link.inlet.slab(slab)[:nbytes] == content


def test_all_slabs_fly_at_once(link: TcpLink) -> None:
    contents = [os.urandom(SLAB) for _ in range(SLABS)]
    for slab, content in enumerate(contents):
        link.inlet.grant(slab, slab + 1)
        link.outlet.slab(slab)[:] = content
        link.outlet.push(slab, slab + 1, SLAB)
    for slab in reversed(range(SLABS)):
        eventually(has_arrived(link, slab, slab + 1, SLAB))
    assert [bytes(link.inlet.slab(slab)) for slab in range(SLABS)] == contents
    eventually(lambda: not any(map(link.outlet.in_flight, range(SLABS))))


def test_a_receiver_that_waits_for_messages_takes_slabs_in_meanwhile(link: TcpLink) -> None:
    link.inlet.grant(0, 1)
    link.outlet.slab(0)[:] = b"x" * SLAB
    link.outlet.push(0, 1, SLAB)
    while not link.inlet.slab(0)[-1]:
        assert link.receiver.receive(60.0) is None
    assert link.inlet.arrived(0, 1, SLAB)


def test_neither_side_spins_while_idle(link: TcpLink, monkeypatch: pytest.MonkeyPatch) -> None:
    link.inlet.grant(0, 1)
    link.outlet.push(0, 1, SLAB)
    eventually(has_arrived(link, 0, 1, SLAB))
    eventually(lambda: not link.outlet.in_flight(0))
    turns: list[Any] = []
    for path in (link.inlet, link.outlet):
        monkeypatch.setattr(path, "turn", lambda ready: bool(turns.append(ready)))
    assert link.sender.receive(0.1) is None
    assert link.receiver.receive(0.1) is None
    assert len(turns) < 5


def test_no_end_of_a_link_has_a_thread(made) -> None:
    before = set(threading.enumerate())
    link = made(streams=4).open()
    link.inlet.grant(0, 1)
    link.outlet.push(0, 1, SLAB)
    eventually(has_arrived(link, 0, 1, SLAB))
    (listening,) = set(threading.enumerate()) - before
    assert listening.name == "kv-tcp-listener"


@pytest.mark.parametrize("nbytes", [0, 1, 31, 32])
def test_streams_without_the_token_are_shown_out(raw: TcpLink, nbytes: int) -> None:
    guess = bytes(byte ^ 1 for byte in raw.token[:nbytes])
    with raw.stream(DATA + guess + b"x" * (32 - nbytes)) as stream:
        assert is_closed_by_peer(stream)
    raw.inlet.arrived(0, 1, 1)  # raises nothing


def test_a_token_is_good_for_the_streams_of_one_link(raw: TcpLink) -> None:
    streams = [raw.stream() for _ in range(raw.streams)]
    with raw.stream() as one_more:
        assert is_closed_by_peer(one_more)
    raw.inlet.grant(0, 1)
    streams[-1].sendall(FRAME.pack(1, 0, 1) + b"x")
    eventually(has_arrived(raw, 0, 1, 1))
    raw.inlet.close()
    for stream in streams:
        assert is_closed_by_peer(stream)
        stream.close()


def test_a_token_dies_with_its_link(raw: TcpLink) -> None:
    raw.inlet.close()
    with raw.stream() as late:
        assert is_closed_by_peer(late)


def make_listener(greeting_timeout_s: float) -> TcpListener:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    return TcpListener(
        sock, address, lambda sock, listener: TcpChannel(sock, listener), greeting_timeout_s
    )


@pytest.mark.parametrize("said", [b"", b"k", b"kvf", DATA, DATA + b"x" * 31])
def test_who_does_not_say_what_it_is_is_shown_out(said: bytes) -> None:
    listener = make_listener(0.1)
    with open_socket(listener.endpoint, b"") as sock:
        sock.sendall(said)
        assert is_closed_by_peer(sock)
    listener.close()


@pytest.mark.parametrize("said", [b"x", b"kvfX", b"\0\0\0\x10", b"GET / HTTP/1.1\r\n\r\n"])
def test_who_says_something_else_is_shown_out_at_once(said: bytes) -> None:
    listener = make_listener(3600.0)
    with open_socket(listener.endpoint, b"") as sock:
        sock.sendall(said)
        assert is_closed_by_peer(sock)
    listener.close()


def test_of_too_many_strangers_the_oldest_gives_way() -> None:
    listener = make_listener(3600.0)
    crowd = [open_socket(listener.endpoint, b"") for _ in range(MAX_STRANGERS)]
    channel = connect(listener.endpoint, 5.0)
    accepted = listener.accept(20.0)
    assert accepted is not None
    assert is_closed_by_peer(crowd[0])
    crowd[1].sendall(CONTROL)
    second = listener.accept(20.0)
    assert second is not None
    for each in (*crowd, channel, accepted, second, listener):
        each.close()


def test_a_listener_that_never_accepts_keeps_a_bounded_number() -> None:
    listener = make_listener(3600.0)
    callers = [connect(listener.endpoint, 5.0) for _ in range(MAX_STRANGERS + 1)]
    with pytest.raises(LinkLost):
        callers[-1].receive(20.0)
    assert callers[0].receive(0.0) is None
    listener.close()
    with pytest.raises(LinkLost):
        callers[0].receive(20.0)
    for caller in callers:
        caller.close()
    with pytest.raises(LinkRefused):
        connect(listener.endpoint, 1.0)


def test_stop_ends_an_accept_that_waits_and_accepts_no_more() -> None:
    listener = make_listener(3600.0)
    timer = threading.Timer(0.05, listener.stop)
    timer.start()
    assert listener.accept(60.0) is None
    timer.join()
    assert listener.accept(60.0) is None
    listener.close()
    listener.close()


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_addresses_of_all_kinds(made, host: str) -> None:
    link = made(host=host).open()
    assert link.listener.endpoint.startswith("tcp:[::1]:" if host == "::1" else "tcp:localhost:")
    link.inlet.grant(0, 1)
    link.outlet.push(0, 1, 1)
    eventually(has_arrived(link, 0, 1, 1))


def test_transfers_whole(pairs_over) -> None:
    pair = pairs_over("tcp")()
    for attempt in (1, 2, 3):
        pair.expect(lease=attempt, attempt=attempt)
        pair.send(lease=attempt, attempt=attempt)
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
        pair.assert_equal()
    assert pair.sender.num_links == 1


@pytest.mark.skipif(compiled_pack() is None, reason="the installation built no host pack")
def test_slabs_are_followed_over_their_stream(pairs_over) -> None:
    assert_followed(pairs_over("tcp")(**LARGE))
