"""Paths over process groups: posting order, deadlines, aborts; on fakes that hang."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fake_group import FakeGroup, FakeWire

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.transports.process_group import MAX_OUTSTANDING, GroupPath
from kvferry.kv_transfer.transports.torch_groups import NcclGroup

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


class FakeNccl:
    """Send and receive as NCCL has them: they begin, and only the stream waits for their end."""

    def __init__(self) -> None:
        self.ends = threading.Event()
        self.posted: list[tuple[str, int, int]] = []
        self.aborts = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeNccl:
        self.posted.append(("send", len(tensors[0]), peer))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> FakeNccl:
        self.posted.append(("recv", len(tensors[0]), peer))
        return self

    def wait(self) -> None:
        self.posted.append(("stream waits", 0, 0))

    def abort(self) -> None:
        self.aborts += 1
        self.ends.set()


class EagerStream:
    """Work begins when it is enqueued; events pass when the fake NCCL says so."""

    def __init__(self, nccl: FakeNccl) -> None:
        self._nccl = nccl

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], None]) -> None:
        work()

    def wait_for(self, event: object) -> None:
        raise AssertionError("nothing to wait for")

    def record(self) -> EagerStream:
        return self

    def synchronize(self) -> None:
        assert self._nccl.ends.wait(TIMEOUT_S)


def test_nccl_posts_exact_sizes_and_lets_the_stream_wait() -> None:
    nccl = FakeNccl()
    group = NcclGroup(nccl, 0, EagerStream(nccl))
    slab = group.memory(100)
    receive, send = group.receive(slab, 60), group.send(slab, 70)
    waits = ("stream waits", 0, 0)
    assert nccl.posted == [("recv", 60, 1), waits, ("send", 70, 1), waits]
    nccl.ends.set()
    receive.wait()
    send.wait()


def test_an_abort_of_nccl_ends_every_path_that_waits() -> None:
    nccl, woken = FakeNccl(), Signal()
    path = GroupPath(NcclGroup(nccl, 0, EagerStream(nccl)), 2, 64, woken, 5.0)
    assert path.is_device
    path.pull(0, 1, 64)
    path.close()
    path.close()
    assert nccl.aborts == 1
    assert not path.is_watched
    with pytest.raises(LinkLost):
        path.arrived(0, 1, 64)


def test_an_aborted_group_reports_no_arrival() -> None:
    """The event of a kernel that an abort ended passes like any other."""
    nccl, woken = FakeNccl(), Signal()
    group = NcclGroup(nccl, 0, EagerStream(nccl))
    path = GroupPath(group, 2, 64, woken, 5.0)
    path.pull(0, 1, 64)
    group.abort()
    with pytest.raises(LinkLost, match="aborted"):
        woken.until(lambda: path.arrived(0, 1, 64))
    path.close()
