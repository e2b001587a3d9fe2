"""Links over process groups: posting order, deadlines, and gloo between real processes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_group import FakeGroup, FakeWire

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.group_store import ChannelStore, Entry
from kvferry.kv_transfer.loopback import LoopbackListener, connect_loopback
from kvferry.kv_transfer.messages import Pull, encode
from kvferry.kv_transfer.process_group import (
    MAX_OUTSTANDING,
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


class Signal:
    """Counts wakes, so that a test can wait for one."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)

    def __call__(self) -> None:
        self._semaphore.release()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for the wakes that make it true."""
        while not condition():
            assert self._semaphore.acquire(timeout=TIMEOUT_S)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def fake_paths(limit: int = MAX_OUTSTANDING) -> Iterator[Paths]:
    paths = Paths(limit)
    try:
        yield paths
    finally:
        paths.inlet.close()
        paths.outlet.close()


class Paths:
    """Both ends over one wire of fakes."""

    def __init__(self, limit: int) -> None:
        self.wire = FakeWire(limit)
        self.clock = FakeClock()
        self.inlet_woken, self.outlet_woken = Signal(), Signal()
        self.inlet = GroupPath(
            FakeGroup(self.wire, 0), NUM_SLABS, SLAB_BYTES, self.inlet_woken, 5.0, self.clock
        )
        self.outlet = GroupPath(
            FakeGroup(self.wire, 1), NUM_SLABS, SLAB_BYTES, self.outlet_woken, 5.0, self.clock
        )

    def wait_for(self, move: Move) -> None:
        """Until both sides have seen a move end; its bytes are the sender's."""
        slab, _, nbytes = move
        self.inlet_woken.until(lambda: self.inlet.arrived(*move))
        self.outlet_woken.until(lambda: not self.outlet.in_flight(slab))
        assert self.inlet.slab(slab)[:nbytes] == self.outlet.slab(slab)[:nbytes]


def test_any_schedule_of_pulls_completes_in_order() -> None:
    """Pulls in any order and of any size, Pull messages that take their time, wires that stall."""
    for _ in range(20):
        with fake_paths() as paths:
            run_schedule(paths, random.Random(random.random()))


def run_schedule(paths: Paths, rng: random.Random) -> None:
    free, filled = list(range(NUM_SLABS)), deque[Move]()
    on_their_way, pulled = deque[Move](), deque[Move]()
    grant, moved = 0, 0
    while moved < 40:
        match rng.randrange(4):
            case 0 if free:
                slab = free.pop(rng.randrange(len(free)))
                grant += 1
                nbytes = rng.randint(1, SLAB_BYTES)
                paths.inlet.grant(slab, grant)
                paths.outlet.slab(slab)[:nbytes] = bytes([grant]) * nbytes
                filled.append((slab, grant, nbytes))
            case 1 if filled:
                filled.rotate(rng.randrange(len(filled)))
                pulled.append(filled.popleft())
                on_their_way.append(pulled[-1])
                paths.inlet.pull(*pulled[-1])
            case 2 if on_their_way:
                paths.outlet.push(*on_their_way.popleft())
            case 3 if paths.wire.move():
                paths.wait_for(pulled[0])
                free.append(pulled.popleft()[0])
                moved += 1
        assert not paths.wire.is_hung


def test_what_is_posted_out_of_order_hangs() -> None:
    """The fake can tell: this is what the order is for."""
    with fake_paths() as paths:
        paths.inlet.pull(0, 1, 100)
        paths.inlet.pull(1, 2, 200)
        paths.outlet.push(1, 2, 200)
        paths.outlet.push(0, 1, 100)
        assert not paths.wire.move()
        assert paths.wire.is_hung
        assert not paths.inlet.arrived(1, 2, 200)


def test_no_more_are_posted_than_the_limit() -> None:
    with fake_paths() as paths:
        for slab in range(NUM_SLABS):
            paths.inlet.pull(slab, slab + 1, 64)
        assert len(paths.wire.posts[0]) == MAX_OUTSTANDING
        for slab in range(NUM_SLABS):
            paths.outlet.push(slab, slab + 1, 64)
        assert all(paths.outlet.in_flight(slab) for slab in range(NUM_SLABS))
        for slab in range(NUM_SLABS):
            assert paths.wire.move()
            paths.wait_for((slab, slab + 1, 64))
            assert all(paths.outlet.in_flight(later) for later in range(slab + 1, NUM_SLABS))


def test_an_earlier_grant_of_a_slab_is_not_this_one() -> None:
    with fake_paths() as paths:
        paths.inlet.pull(3, 1, 64)
        paths.outlet.push(3, 1, 64)
        assert paths.wire.move()
        paths.wait_for((3, 1, 64))
        assert not paths.inlet.arrived(3, 2, 64)
        assert not paths.inlet.arrived(3, 1, 65)
        paths.inlet.grant(3, 2)
        assert not paths.inlet.arrived(3, 1, 64)


def test_an_operation_that_hangs_loses_the_link() -> None:
    with fake_paths() as paths:
        paths.inlet.pull(0, 1, 64)
        paths.clock.now += 4.0
        assert not paths.inlet.arrived(0, 1, 64)
        paths.clock.now += 2.0
        with pytest.raises(LinkLost, match="has not moved for 5 s"):
            paths.inlet.arrived(0, 1, 64)
        with pytest.raises(LinkLost):
            paths.inlet.pull(1, 2, 64)


def test_waiting_in_line_is_no_hang() -> None:
    """The deadline is of the oldest operation since it became the oldest."""
    with fake_paths() as paths:
        for slab in range(NUM_SLABS):
            paths.inlet.pull(slab, slab + 1, 64)
            paths.outlet.push(slab, slab + 1, 64)
        for slab in range(NUM_SLABS):
            paths.clock.now += 4.0
            assert paths.wire.move()
            paths.wait_for((slab, slab + 1, 64))


def test_an_idle_path_does_not_age() -> None:
    with fake_paths() as paths:
        paths.clock.now += 1000.0
        paths.inlet.pull(0, 1, 64)
        assert not paths.inlet.arrived(0, 1, 64)


def test_a_close_aborts_what_is_posted_on_both_sides() -> None:
    with fake_paths() as paths:
        paths.inlet.pull(0, 1, 64)
        paths.outlet.push(1, 2, 64)
        paths.inlet.close()
        with pytest.raises(LinkLost):
            paths.outlet_woken.until(lambda: not paths.outlet.in_flight(1))
        with pytest.raises(LinkLost, match="closed"):
            paths.inlet.arrived(0, 1, 64)
        assert not paths.inlet.is_watched


@pytest.mark.parametrize("nbytes", [0, SLAB_BYTES + 1])
def test_no_slab_moves_other_bytes_than_its_own(nbytes: int) -> None:
    with fake_paths() as paths:
        with pytest.raises(ProtocolError):
            paths.inlet.pull(0, 1, nbytes)
        with pytest.raises(ProtocolError):
            paths.outlet.push(0, 1, nbytes)


class Sides:
    """Two channels that build fake groups, each on a thread of its own."""

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
