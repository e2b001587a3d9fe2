"""A sender over tcp whose receiver does not do its part."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest
from tcp_link import FRAME, SLAB

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.transports.tcp import connect_tcp
from kvferry.kv_transfer.transports.tcp_listener import CONTROL, DATA


class Mute:
    """A receiver that opens a path and reads nothing from it."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.sender = connect_tcp(f"tcp:127.0.0.1:{self.server.getsockname()[1]}", 5.0)
        self.control, _ = self.server.accept()
        assert self.control.recv(len(CONTROL)) == CONTROL

    def say(self, frame: bytes) -> None:
        self.control.sendall(struct.pack("!I", len(frame)) + frame)

    def close(self) -> None:
        for each in (self.sender, self.control, self.server):
            each.close()


@pytest.fixture
def mute() -> Iterator[Mute]:
    mute = Mute()
    yield mute
    mute.close()


def test_a_peer_that_reads_nothing_does_not_hold_the_sender(mute: Mute) -> None:
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(1, 8 << 20, 5.0)
    stream, _ = mute.server.accept()
    outlet.push(0, 1, 8 << 20)
    assert mute.sender.receive(0.05) is None
    assert outlet.in_flight(0)
    outlet.close()
    with pytest.raises(LinkLost):
        outlet.in_flight(0)
    stream.close()


def test_a_sender_that_waits_for_messages_sends_meanwhile(mute: Mute) -> None:
    nbytes = 16 << 20
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(2, nbytes, 5.0)
    stream, _ = mute.server.accept()
    content = os.urandom(nbytes)
    outlet.slab(1)[:] = content
    outlet.push(1, 7, nbytes)
    outlet.push(0, 8, 1)  # waits in line
    assert outlet.in_flight(1)
    received = bytearray()
    reader = threading.Thread(target=read_all, args=(stream, received))
    reader.start()
    assert mute.sender.receive(60.0) is None
    assert mute.sender.receive(60.0) is None
    outlet.close()
    reader.join()
    greeting, head, other = len(DATA) + 32, FRAME.pack(7, 1, nbytes), FRAME.pack(8, 0, 1)
    assert received[greeting:] == head + content + other + b"\0"
    stream.close()


def read_all(stream: socket.socket, received: bytearray) -> None:
    while data := stream.recv(1 << 16):
        received += data


def test_a_stream_that_the_peer_closes_breaks_the_path(mute: Mute) -> None:
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(1, 8 << 20, 5.0)
    stream, _ = mute.server.accept()
    outlet.push(0, 1, 8 << 20)
    stream.close()
    assert mute.sender.receive(20.0) is None  # woken
    with pytest.raises(LinkLost):
        outlet.in_flight(0)
    with pytest.raises(LinkLost):
        outlet.push(0, 2, 1)
    outlet.close()


@pytest.mark.parametrize(
    "setup",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode((b"t" * 31, 1)),
        msgspec.msgpack.encode((b"t" * 32, 0)),
        msgspec.msgpack.encode((b"t" * 32, 65)),
        msgspec.msgpack.encode((b"t" * 32, 2**64 - 1)),
        msgspec.msgpack.encode((b"t" * 32, 1, 1)),
        msgspec.msgpack.encode((b"t" * 200, 1)),
        b"\x91" * 200,
    ],
)
def test_a_setup_that_is_none_is_refused(mute: Mute, setup: bytes) -> None:
    mute.say(setup)
    with pytest.raises(ProtocolError):
        mute.sender.open_outlet(1, SLAB, 5.0)


def test_a_receiver_that_opens_nothing_loses_the_link(mute: Mute) -> None:
    with pytest.raises(LinkLost, match="opens no data path"):
        mute.sender.open_outlet(1, SLAB, 0.05)


def test_a_port_that_is_gone_by_set_up_loses_the_link(mute: Mute) -> None:
    mute.server.close()
    mute.say(msgspec.msgpack.encode((b"t" * 32, 2)))
    with pytest.raises(LinkLost, match="no data path"):
        mute.sender.open_outlet(1, SLAB, 5.0)


def test_a_slab_that_is_begun_goes_on_from_where_its_pack_has_sent_it(mute: Mute) -> None:
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(2, SLAB, 5.0)
    stream, _ = mute.server.accept()
    content = os.urandom(SLAB)
    outlet.slab(1)[:] = content
    begun = outlet.progress(1, 7, SLAB)
    assert begun is not None
    assert outlet.progress(0, 8, SLAB) is None  # its only stream is taken
    begun.moved = os.write(begun.fd, content[:1000])
    received = bytearray()
    reader = threading.Thread(target=read_all, args=(stream, received))
    reader.start()
    outlet.push(1, 7, SLAB)
    while outlet.in_flight(1):
        mute.sender.receive(0.01)
    outlet.close()
    reader.join()
    assert received[len(DATA) + 32 :] == FRAME.pack(7, 1, SLAB) + content
    stream.close()


def test_a_slab_that_is_begun_and_never_pushed_is_in_flight_until_it_is_gone(mute: Mute) -> None:
    """The stream carries others after it."""
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(2, SLAB, 5.0)
    stream, _ = mute.server.accept()
    assert outlet.progress(1, 7, SLAB) is not None
    outlet.push(0, 8, 1)
    received = bytearray()
    reader = threading.Thread(target=read_all, args=(stream, received))
    reader.start()
    while outlet.in_flight(1) or outlet.in_flight(0):
        mute.sender.receive(0.01)
    outlet.close()
    reader.join()
    assert len(received) == len(DATA) + 32 + 2 * FRAME.size + SLAB + 1
    stream.close()


def test_a_slab_is_not_begun_over_a_path_that_broke(mute: Mute) -> None:
    mute.say(msgspec.msgpack.encode((b"t" * 32, 1)))
    outlet = mute.sender.open_outlet(1, SLAB, 5.0)
    outlet.close()
    with pytest.raises(LinkLost):
        outlet.progress(0, 1, SLAB)
