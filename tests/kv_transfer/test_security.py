"""Whoever reaches a port of the KV plane, whatever it says, loses that connection and no more."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from strangers import BAD_INPUT, Marker, framed, is_closed_by_peer, open_socket

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.endpoints import TRANSPORTS, ListenOptions, Medium, connect, listen
from kvferry.kv_transfer.frames import decode_to_receiver, decode_to_sender
from kvferry.kv_transfer.handshake import introduce
from kvferry.kv_transfer.jobs import ReceiveDone, SendDone
from kvferry.kv_transfer.messages import MAX_HANDSHAKE_FRAME, Challenge, Proof, Refused

USABLE = [name for name, transport in TRANSPORTS.items() if transport.why_not() is None]
SOCKETS = [name for name in USABLE if name != "loopback"]


class Guarded:
    """A receiver that listens by one transport, and by loopback to see that it still works."""

    def __init__(self, make_pair: Any, transport: str, **options: Any) -> None:
        self.pair = make_pair(also=(transport,), **({"silence_s": 0.2, "beat_s": 0.05} | options))
        self.endpoint: str = self.pair.receiver.endpoints[1]
        self.attempt = 0

    def assert_works(self) -> None:
        self.attempt += 1
        names = {"lease": self.attempt, "attempt": self.attempt}
        self.pair.expect(**names)
        self.pair.send(endpoints=self.pair.receiver.endpoints[:1], **names)
        assert isinstance(self.pair.received.next(), ReceiveDone)
        assert isinstance(self.pair.sent.next(), SendDone)
        self.pair.assert_equal()


@pytest.fixture(params=SOCKETS)
def guarded(request: pytest.FixtureRequest, make_loopback_pair: Any) -> Guarded:
    return Guarded(make_loopback_pair, request.param)


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 0
    while count or is_open(limit):
        count -= not is_open(limit)
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_bad_input_closes_that_connection_alone(guarded: Guarded) -> None:
    before = count_descriptors()
    socks = {}
    for name, data in BAD_INPUT.items():
        socks[name] = open_socket(guarded.endpoint)
        socks[name].sendall(data)
    guarded.assert_works()
    for sock in socks.values():
        assert is_closed_by_peer(sock)
        sock.close()
    assert not Marker.touched
    guarded.assert_works()
    # The link that assert_works uses has no descriptors.
    eventually(lambda: count_descriptors() == before)


def test_silence_and_trickles_are_cut_off(guarded: Guarded) -> None:
    silent, slow = open_socket(guarded.endpoint), open_socket(guarded.endpoint)
    message = struct.pack("!I", MAX_HANDSHAKE_FRAME) + b"x" * MAX_HANDSHAKE_FRAME
    sent = 0
    try:
        for byte in message:
            slow.sendall(bytes([byte]))
            sent += 1
            time.sleep(0.005)
    except ConnectionError:
        pass
    assert sent < len(message)
    assert is_closed_by_peer(silent)
    for sock in (silent, slow):
        sock.close()
    guarded.assert_works()


def test_claims_of_length_take_no_memory(guarded: Guarded) -> None:
    guarded.assert_works()
    before = rss_bytes()
    for _ in range(50):
        with open_socket(guarded.endpoint) as sock:
            sock.sendall(struct.pack("!I", 0xFFFFFFF0) + b"x" * 4096)
            assert is_closed_by_peer(sock)
    assert rss_bytes() - before < 32 << 20
    guarded.assert_works()


class Recording:
    """A channel that keeps what is sent over it."""

    def __init__(self, channel: Any) -> None:
        self.sent: list[bytes] = []
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, frame: bytes, timeout_s: float) -> None:
        self.sent.append(frame)
        self._channel.send(frame, timeout_s)


def test_a_proof_cannot_be_used_again(guarded: Guarded) -> None:
    channel = Recording(connect(guarded.pair.receiver.endpoints[0], 5.0))
    introduce(channel, guarded.pair.options, 0, ["xxh3"])
    channel.close()
    assert isinstance(decode_to_receiver(channel.sent[0]), Proof)
    with open_socket(guarded.endpoint) as sock:
        read_frame(sock)
        sock.sendall(framed(channel.sent[0]))
        answer = decode_to_sender(read_frame(sock))
        assert isinstance(answer, Refused)
        assert "secret" in answer.detail
        assert is_closed_by_peer(sock)


@pytest.mark.parametrize("name", USABLE)
def test_a_wrong_secret_is_refused(make_loopback_pair, name: str) -> None:
    guarded = Guarded(make_loopback_pair, name)
    options = replace(guarded.pair.options, secret=b"another secret")
    channel = connect(guarded.endpoint, 5.0)
    with pytest.raises(LinkRefused, match="secret"):
        introduce(channel, options, 0, ["xxh3"])
    channel.close()
    guarded.assert_works()


def read_frame(sock: socket.socket) -> bytes:
    (length,) = struct.unpack("!I", read_exactly(sock, 4))
    return read_exactly(sock, length)


def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        data += sock.recv(nbytes - len(data)) or pytest.fail("closed")
    return data


def listening_addresses() -> set[tuple[str, int]]:
    """TCP sockets on which this process listens, whoever in it opened them."""
    ours = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            ours.add(os.readlink(f"/proc/self/fd/{name}"))
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, port = fields[1].split(":")
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                words = struct.unpack(f"<{width // 8}I", bytes.fromhex(address))
                raw = struct.pack(f">{width // 8}I", *words)
                found.add((str(ip_address(raw)), int(port, 16)))
    return found


@pytest.mark.parametrize("name", USABLE)
def test_nothing_is_bound_but_to_loopback_unless_told(pairs_over, name: str) -> None:
    """Not even what a library opens for itself while a link is set up and used."""
    before = listening_addresses()
    pair = pairs_over(name)()
    pair.expect()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    opened = listening_addresses() - before
    assert bool(opened) == (TRANSPORTS[name].medium is Medium.NETWORK)
    assert {address for address, _ in opened} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("name", [name for name in SOCKETS if name != "shm"])
def test_what_is_told_is_bound(name: str) -> None:
    before = listening_addresses()
    with closing(listen(name, ListenOptions(host="127.0.0.9"))):
        assert {address for address, _ in listening_addresses() - before} == {"127.0.0.9"}


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_link_begins_or_leaves_nothing_whatever_descriptors_are_left(name: str) -> None:
    """At every point of its beginning they may run out."""
    with closing(listen(name)) as listener:
        allowed, opened = 0, False
        while not opened:
            before = count_descriptors()
            with descriptors_left(allowed):
                opened = open_link(listener)
            eventually(lambda before=before: drained(listener) and count_descriptors() == before)
            allowed += 1
        assert 4 < allowed < 30
        assert open_link(listener)


def drained(listener: Any) -> bool:
    """Close what was accepted late, after its sender had given up."""
    while (late := listener.accept(0.0)) is not None:
        late.close()
    return True


def open_link(listener: Any) -> bool:
    """Open and close a link. Whether it came about; raises nothing but what a link may raise."""
    parts: list[Any] = []
    try:
        sender = connect(listener.endpoint, 1.0)
        parts.append(sender)
        receiver = listener.accept(0.1)
        if receiver is None:
            return False
        parts.append(receiver)
        inlet = receiver.open_inlet(2, 4096, 1.0)
        parts.insert(0, inlet)
        outlet = sender.open_outlet(2, 4096, 1.0)
        parts.insert(0, outlet)
        inlet.grant(0, 1)
        outlet.slab(0)[:1] = b"x"
        outlet.push(0, 1, 1)
        deadline = time.monotonic() + 0.3
        while not inlet.arrived(0, 1, 1):
            if time.monotonic() > deadline:
                return False
            receiver.receive(0.05)
        return True
    except (LinkLost, ProtocolError):
        return False
    finally:
        for part in parts:
            part.close()


def test_a_receiver_out_of_descriptors_takes_links_again_later(guarded: Guarded) -> None:
    with descriptors_left(1):
        sock = open_socket(guarded.endpoint)  # takes the last one
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1)
    sock.settimeout(20.0)
    assert isinstance(decode_to_sender(read_frame(sock)), Challenge)
    sock.close()
    guarded.assert_works()
