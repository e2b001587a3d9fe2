"""Links over gloo: set up over their control channel, between threads and between processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.messages import Pull
from kvferry.kv_transfer.transports.group_store import ChannelStore, Entry
from kvferry.kv_transfer.transports.loopback import LoopbackListener, connect_loopback
from kvferry.kv_transfer.transports.process_group import (
    GroupChannel,
    GroupPath,
    connect_gloo,
    listen_gloo,
)

PEER = Path(__file__).with_name("group_peer.py")
NUM_SLABS, SLAB_BYTES = 10, 1 << 12
Move = tuple[int, int, int]
"""(slab, grant, bytes)."""
TIMEOUT_S = 30.0


class Sides:
    """Both sides of a link in one process; each builds its group on a thread of its own."""

    def __init__(self) -> None:
        self.listener = listen_gloo("127.0.0.1")
        self.dialled = connect_gloo(self.listener.endpoint, TIMEOUT_S)
        accepted = self.listener.accept(TIMEOUT_S)
        assert isinstance(accepted, GroupChannel)
        self.accepted = accepted

    def open(self) -> tuple[GroupPath, GroupPath]:
        """(inlet, outlet)."""
        outlets: list[GroupPath] = []
        thread = threading.Thread(
            target=lambda: outlets.append(self.dialled.open_outlet(NUM_SLABS, SLAB_BYTES, 9.0))
        )
        thread.start()
        inlet = self.accepted.open_inlet(NUM_SLABS, SLAB_BYTES, 9.0)
        thread.join()
        return inlet, outlets[0]

    def close(self) -> None:
        self.dialled.close()
        self.accepted.close()
        self.listener.close()


def wait_for_arrival(channel: GroupChannel, inlet: GroupPath, move: Move) -> None:
    while not inlet.arrived(*move):
        channel.receive(TIMEOUT_S)


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


def test_gloo_moves_slabs(sides: Sides) -> None:
    inlet, outlet = sides.open()
    assert inlet.is_pulled
    assert not inlet.is_device
    for slab in range(NUM_SLABS):
        outlet.slab(slab)[:] = bytes([slab]) * SLAB_BYTES
        inlet.slab(slab)[:] = b"\xff" * SLAB_BYTES
        inlet.grant(slab, slab + 1)
        inlet.pull(slab, slab + 1, SLAB_BYTES - slab)
        outlet.push(slab, slab + 1, SLAB_BYTES - slab)
    for slab in range(NUM_SLABS):
        wait_for_arrival(sides.accepted, inlet, (slab, slab + 1, SLAB_BYTES - slab))
        while outlet.in_flight(slab):
            sides.dialled.receive(TIMEOUT_S)
        expected = bytes([slab]) * (SLAB_BYTES - slab) + b"\xff" * slab
        assert bytes(inlet.slab(slab)) == expected


def test_the_control_channel_is_its_own_again_after_set_up(sides: Sides) -> None:
    sides.open()
    sides.dialled.send(b"first", 1.0)
    assert sides.accepted.receive(TIMEOUT_S) == b"first"


def test_more_bytes_than_asked_for_end_in_the_slab(sides: Sides) -> None:
    """Gloo would end the process if they did not fit: a peer that is out of step harms one link."""
    inlet, outlet = sides.open()
    inlet.pull(0, 1, 10)
    outlet.push(0, 1, SLAB_BYTES)
    wait_for_arrival(sides.accepted, inlet, (0, 1, 10))


def test_a_closed_peer_is_a_lost_link(sides: Sides) -> None:
    inlet, _ = sides.open()
    inlet.pull(0, 1, 10)
    sides.dialled.close()
    with pytest.raises(LinkLost):
        wait_for_arrival(sides.accepted, inlet, (0, 1, 10))


def test_a_peer_that_joins_no_group_is_waited_for_no_longer_than_said(sides: Sides) -> None:
    with pytest.raises(LinkLost, match="in time"):
        sides.accepted.open_inlet(NUM_SLABS, SLAB_BYTES, 0.1)


@pytest.mark.parametrize(
    "frame",
    [
        b"\x80",
        b"garbage",
        encode(Pull(slab=0, grant=0)),
        encode(Entry(key="k" * 500, value=b"")),
        encode(Entry(key="k", value=b"v" * 5000)),
    ],
)
def test_a_set_up_takes_nothing_but_its_own_messages(sides: Sides, frame: bytes) -> None:
    sides.dialled.send(frame, 1.0)
    with pytest.raises(ProtocolError):
        sides.accepted.open_inlet(NUM_SLABS, SLAB_BYTES, 9.0)


def stores() -> tuple[ChannelStore, ChannelStore]:
    listener = LoopbackListener()
    near = connect_loopback(listener.endpoint, 1.0)
    far = listener.accept(1.0)
    assert far is not None
    listener.close()
    deadline = time.monotonic() + TIMEOUT_S
    return ChannelStore(near, deadline), ChannelStore(far, deadline)


def test_each_side_reads_what_the_other_sets() -> None:
    near, far = stores()
    near.set("a", "1")
    far.set("b", b"2")
    assert (far.get("a"), near.get("b"), near.get("a")) == (b"1", b"2", b"1")
    far.wait(["a", "b"])
    assert far.check(["a", "b"])
    assert not far.check(["c"])


def test_a_key_that_never_comes_is_a_lost_link_once_the_peer_is_ready() -> None:
    near, far = stores()
    thread = threading.Thread(target=far.finish)
    thread.start()
    with pytest.raises(LinkLost, match="has not set"):
        near.get("a")
    near.finish()
    thread.join()
    near.set("late", "stays here")
    assert near.get("late") == b"stays here"


def test_a_peer_cannot_fill_the_store() -> None:
    near, far = stores()
    for number in range(100):
        far.set(str(number), "")
    with pytest.raises(ProtocolError, match="too many"):
        near.get("none of them")


@pytest.fixture
def listening() -> Iterator[tuple[GroupChannel, subprocess.Popen[str], Callable[[], GroupPath]]]:
    """The receiver's channel, and a sender in a process of its own."""
    listener = listen_gloo("127.0.0.1")
    command = [sys.executable, "-P", str(PEER), listener.endpoint, "4", str(1 << 20), "2"]
    peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    channel = listener.accept(TIMEOUT_S)
    assert isinstance(channel, GroupChannel)
    yield channel, peer, lambda: channel.open_inlet(4, 1 << 20, TIMEOUT_S)
    peer.kill()
    peer.wait()
    assert peer.stdout is not None
    peer.stdout.close()
    channel.close()
    listener.close()


def test_a_killed_peer_is_a_lost_link_at_once(
    listening: tuple[GroupChannel, subprocess.Popen[str], Callable[[], GroupPath]],
) -> None:
    channel, peer, open_inlet = listening
    inlet = open_inlet()
    for slab in range(4):
        inlet.pull(slab, slab + 1, 1 << 20)
        channel.send(encode(Pull(slab=slab, grant=slab + 1)), 1.0)
    for slab in range(2):
        wait_for_arrival(channel, inlet, (slab, slab + 1, 1 << 20))
        assert bytes(inlet.slab(slab)) == bytes([slab + 1]) * (1 << 20)
    assert peer.stdout is not None
    assert peer.stdout.readline() == "stands still\n"
    peer.kill()
    with pytest.raises(LinkLost):
        wait_for_arrival(channel, inlet, (2, 3, 1 << 20))
    inlet.close()
    assert not inlet.is_watched
