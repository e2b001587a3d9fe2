"""The transport at fault: each fault does what its name says, and the same one again each time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.kv_transfer.endpoints import connect, listen
from kvferry.kv_transfer.frames import decode_to_sender, encode
from kvferry.kv_transfer.messages import Ack, Beat, Complete
from kvferry.kv_transfer.transports.faults import (
    FAULTS_AT,
    Chances,
    Fault,
    Faults,
    Place,
    Point,
    Schedule,
    Script,
    Side,
    Step,
)
from kvferry.kv_transfer.transports.faulty import FaultyConnect, FaultyListener

SLAB = 64


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """A loopback link; what the receiver sends, and what the sender pushes, is at fault."""

    clock: Clock = field(default_factory=Clock)
    opened: list[Any] = field(default_factory=list)

    def open(self, schedule: Schedule, **options: Any) -> Rig:
        self.faults = Faults(schedule, clock=self.clock, **({"delay_s": 10.0} | options))
        listener = FaultyListener(listen("loopback"), self.faults)
        self.sender = FaultyConnect(connect, self.faults)(listener.endpoint, 1.0)
        receiver = listener.accept(1.0)
        assert receiver is not None
        self.receiver = receiver
        self.opened += [listener, self.sender, receiver]
        self.inlet = receiver.open_inlet(2, SLAB, 1.0)
        self.outlet = self.sender.open_outlet(2, SLAB, 1.0)
        return self

    def frames(self) -> list[int]:
        """The numbers of the frames that the sender has by now; -1 for a damaged one."""
        self.receiver.pump()
        numbers = []
        while (frame := self.sender.receive(0.0)) is not None:
            try:
                message = decode_to_sender(frame)
            except ProtocolError:
                numbers.append(-1)
            else:
                assert isinstance(message, Ack)
                numbers.append(message.index)
        return numbers

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.receiver.send(ack(number), 1.0)

    def push(self, content: bytes, slab: int = 0) -> bytes:
        """What the receiver finds of a slab."""
        self.outlet.slab(slab)[:] = content
        self.outlet.push(slab, 1, SLAB)
        return bytes(self.inlet.slab(slab))


def ack(number: int) -> bytes:
    return encode(Ack(lease=1, index=number, grant=1))


def at_frame(fault: Fault, nth: int = 0) -> Script:
    return Script([Step(fault, nth=nth)])


def at_push(fault: Fault, nth: int = 0) -> Script:
    return Script([Step(fault, Place.PUSH, nth=nth)])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for each in rig.opened:
        each.close()


def test_without_faults_nothing_changes(rig: Rig) -> None:
    rig.open(Script([]))
    rig.send(1, 2, 3)
    assert rig.frames() == [1, 2, 3]
    assert rig.push(b"a" * SLAB) == b"a" * SLAB
    assert not rig.outlet.in_flight(0)
    assert not rig.faults.counters


@pytest.mark.parametrize(
    ("fault", "at_once", "later"),
    [
        (Fault.DROP, [1, 3], []),
        (Fault.DUPLICATE, [1, 2, 2, 3], []),
        (Fault.DELAY, [1], [2, 3]),
        (Fault.REORDER, [1, 3], [2]),
        (Fault.TRUNCATE, [1, -1, 3], []),
        (Fault.FLIP, [1, -1, 3], []),
        (Fault.SILENCE, [1], []),
    ],
)
def test_each_fault_of_a_frame(
    rig: Rig, fault: Fault, at_once: list[int], later: list[int]
) -> None:
    rig.open(at_frame(fault, nth=1))
    rig.send(1, 2, 3)
    assert rig.frames() == at_once
    rig.clock.now += 10.0
    assert rig.frames() == later
    assert rig.faults.counters == {fault: 1}


def test_a_replay_brings_an_older_frame_of_an_earlier_link(rig: Rig) -> None:
    rig.open(Script([Step(Fault.REPLAY, link=1, nth=1)]))
    rig.send(7)
    faults = rig.faults
    second = Rig(opened=rig.opened)
    listener = FaultyListener(listen("loopback"), faults)
    second.sender = FaultyConnect(connect, faults)(listener.endpoint, 1.0)
    receiver = listener.accept(1.0)
    assert receiver is not None
    second.receiver = receiver
    rig.opened += [listener, second.sender, receiver]
    receiver.open_inlet(1, SLAB, 1.0)
    second.send(8, 9)
    replayed = second.frames()
    assert (replayed[0], replayed[2]) == (8, 9)
    assert replayed[1] in (7, 8, 9)


def test_death_is_seen_by_both_sides(rig: Rig) -> None:
    rig.open(at_frame(Fault.DIE, nth=1))
    rig.send(1)
    with pytest.raises(LinkLost):
        rig.send(2)
    with pytest.raises(LinkLost):
        rig.receiver.receive(0.0)
    assert decode_to_sender(rig.sender.receive(0.0) or b"") == Ack(lease=1, index=1, grant=1)
    with pytest.raises(LinkLost):
        rig.sender.receive(0.0)
    rig.receiver.wake()


def test_silence_lasts_and_stops_pushes_too(rig: Rig) -> None:
    rig.open(Script([Step(Fault.SILENCE, Place.PUSH)]))
    rig.push(b"a" * SLAB)
    rig.sender.send(encode(Beat()), 1.0)
    assert rig.receiver.receive(0.0) is None
    rig.send(1)
    assert rig.frames() == [1]


def test_a_slab_is_damaged_by_one_bit(rig: Rig) -> None:
    rig.open(at_push(Fault.FLIP_SLAB))
    got = int.from_bytes(rig.push(bytes(SLAB)), "big")
    assert got.bit_count() == 1
    assert rig.push(bytes(SLAB)) == bytes(SLAB)


@pytest.mark.parametrize("fault", [Fault.STALE_SLAB, Fault.TORN_SLAB])
def test_a_slab_of_an_earlier_push_comes_again(rig: Rig, fault: Fault) -> None:
    rig.open(at_push(fault, nth=1))
    rig.push(b"a" * SLAB, slab=1)
    kept = SLAB // 2 if fault is Fault.TORN_SLAB else 0
    assert rig.push(b"b" * SLAB) == b"b" * kept + b"a" * (SLAB - kept)


def test_a_late_slab_is_in_flight_until_its_time(rig: Rig) -> None:
    rig.open(at_push(Fault.LATE_SLAB))
    rig.push(b"a" * SLAB)
    assert rig.outlet.in_flight(0)
    assert not rig.outlet.in_flight(1)
    due_s = rig.sender.pump()
    assert 0.0 < due_s <= 10.0
    rig.clock.now += due_s
    assert not rig.outlet.in_flight(0)


@pytest.mark.parametrize(("fault", "error"), [(Fault.DIE, LinkLost), (Fault.REFUSE, LinkRefused)])
def test_a_connection_fails(rig: Rig, fault: Fault, error: type[Exception]) -> None:
    with pytest.raises(error, match="schedule"):
        rig.open(Script([Step(fault, Place.CONNECT)]))


def test_memory_that_is_not_handed_over(rig: Rig) -> None:
    with pytest.raises(LinkLost):
        rig.open(Script([Step(Fault.DIE, Place.OPEN, side=Side.RECEIVER)]))


def test_a_link_is_at_fault_only_once_it_is_open(rig: Rig) -> None:
    faults = Faults(Chances({Fault.DROP: 1.0}), clock=rig.clock)
    listener = FaultyListener(listen("loopback"), faults)
    sender = FaultyConnect(connect, faults)(listener.endpoint, 1.0)
    receiver = listener.accept(1.0)
    assert receiver is not None
    rig.opened += [listener, sender, receiver]
    receiver.send(ack(1), 1.0)
    assert sender.receive(0.0) == ack(1)
    receiver.open_inlet(1, SLAB, 1.0)
    receiver.send(ack(2), 1.0)
    assert sender.receive(0.0) is None


def test_a_message_is_named_by_its_tag(rig: Rig) -> None:
    rig.open(Script([Step(Fault.DROP, message="ack", nth=1)]))
    key = AttemptKey(Incarnation(1), RequestId(2), 3)
    rig.send(1)
    rig.receiver.send(encode(Complete(key=key, lease=1)), 1.0)
    rig.send(2, 3)
    got = [decode_to_sender(rig.sender.receive(0.0) or b"") for _ in range(3)]
    assert [getattr(message, "index", None) for message in got] == [1, None, 3]


def test_late_frames_tell_when_they_are_due(rig: Rig) -> None:
    rig.open(at_frame(Fault.DELAY))
    assert rig.receiver.pump() == float("inf")
    rig.send(1)
    due_s = rig.receiver.pump()
    assert 1.0 <= due_s <= 10.0
    rig.clock.now += due_s - 0.01
    assert rig.frames() == []
    rig.clock.now += 0.01
    assert rig.receiver.receive(0.0) is None  # using the channel is enough
    assert decode_to_sender(rig.sender.receive(0.0) or b"") == Ack(lease=1, index=1, grant=1)


def run(seed: int) -> tuple[list[int], dict[Fault, int]]:
    rig = Rig()
    chances = dict.fromkeys(FAULTS_AT[Place.SEND], 0.1) | {Fault.DIE: 0.0, Fault.SILENCE: 0.0}
    try:
        rig.open(Chances(chances), seed=seed)
        got = []
        for number in range(300):
            rig.send(number)
            got += rig.frames()
            rig.clock.now += 1.0
        rig.faults.heal()
        rig.clock.now += 10.0
        got += rig.frames()
        rig.send(1000)
        assert rig.frames() == [1000]
        return got, dict(rig.faults.counters)
    finally:
        for each in rig.opened:
            each.close()


def test_a_seed_decides_everything() -> None:
    first, counters = run(3)
    assert run(3) == (first, counters)
    assert run(4)[0] != first
    assert set(counters) == set(FAULTS_AT[Place.SEND]) - {Fault.DIE, Fault.SILENCE}
    missing = set(range(300)) - set(first)
    damaged = first.count(-1)
    assert len(missing) <= counters[Fault.DROP] + damaged
    assert damaged == counters[Fault.FLIP] + counters[Fault.TRUNCATE]


def test_chances_add_up_and_exclude_each_other() -> None:
    point = Point(Side.SENDER, 0, Place.PUSH, 0)
    random = Random(1)
    chances = Chances({Fault.FLIP_SLAB: 0.25, Fault.STALE_SLAB: 0.25, Fault.DROP: 1.0})
    drawn = [chances(point, random) for _ in range(4000)]
    assert set(drawn) == {None, Fault.FLIP_SLAB, Fault.STALE_SLAB}
    assert 1700 < drawn.count(None) < 2300
    assert 800 < drawn.count(Fault.FLIP_SLAB) < 1200
