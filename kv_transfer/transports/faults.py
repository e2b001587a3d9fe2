"""Which faults befall which links, and when; ``faulty`` does them.

A schedule is asked at every point where something may go wrong, and answers with a fault or None.
Points are counted per link and place, and each link draws from a generator of its own, so that the
faults of a link depend on the seed and on what the link does, not on the timing of other links.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Protocol

_FRAMES_KEPT = 256
_SLABS_KEPT = 8


class Side(StrEnum):
    """Whose end of the link is at fault."""

    SENDER = "sender"
    RECEIVER = "receiver"


class Place(StrEnum):
    """Where something may go wrong."""

    CONNECT = "connect"
    OPEN = "open"
    """An inlet or outlet is being opened."""
    SEND = "send"
    """A frame leaves this side."""
    PUSH = "push"
    """The bytes of a slab leave the sender."""


class Fault(StrEnum):
    """What may go wrong."""

    DELAY = "delay"
    """This frame comes late, and whatever is sent behind it waits."""
    REORDER = "reorder"
    """This frame comes late, and others overtake it."""
    DROP = "drop"
    DUPLICATE = "duplicate"
    TRUNCATE = "truncate"
    FLIP = "flip"
    """One bit of the frame is inverted."""
    REPLAY = "replay"
    """An older frame of this side, from this link or an earlier one, comes once more, first."""
    LATE_SLAB = "late_slab"
    """The bytes leave late."""
    FLIP_SLAB = "flip_slab"
    """One bit of the bytes is inverted."""
    STALE_SLAB = "stale_slab"
    """Bytes that an earlier push carried, perhaps of another attempt, come instead."""
    TORN_SLAB = "torn_slab"
    """The second half of the bytes is what an earlier push carried."""
    SILENCE = "silence"
    """From now on nothing leaves this side, and nobody is told."""
    DIE = "die"
    """The link is closed."""
    REFUSE = "refuse"
    """The peer will not have the link."""


FAULTS_AT: Mapping[Place, tuple[Fault, ...]] = {
    Place.CONNECT: (Fault.DIE, Fault.REFUSE),
    Place.OPEN: (Fault.DIE,),
    Place.SEND: (
        Fault.DELAY,
        Fault.REORDER,
        Fault.DROP,
        Fault.DUPLICATE,
        Fault.TRUNCATE,
        Fault.FLIP,
        Fault.REPLAY,
        Fault.SILENCE,
        Fault.DIE,
    ),
    Place.PUSH: (
        Fault.LATE_SLAB,
        Fault.FLIP_SLAB,
        Fault.STALE_SLAB,
        Fault.TORN_SLAB,
        Fault.SILENCE,
        Fault.DIE,
    ),
}


@dataclass(frozen=True, slots=True)
class Point:
    """A moment at which something may go wrong."""

    side: Side
    link: int
    """Counts the links of this side from 0, failed connects among them."""
    place: Place
    nth: int
    """Counts the points of this link and place from 0."""
    message: str = ""
    """SEND: the tag of the message, as in ``messages``."""
    nth_of_message: int = 0


class Schedule(Protocol):
    """Decides about a point. Must depend on nothing but its arguments."""

    def __call__(self, point: Point, random: Random) -> Fault | None: ...


@dataclass(frozen=True, slots=True)
class Chances:
    """Every fault that is possible at a point has its own chance; at most one happens."""

    chances: Mapping[Fault, float]
    """Between 0 and 1; what is not named never happens."""

    def __call__(self, point: Point, random: Random) -> Fault | None:
        drawn = random.random()
        for fault in FAULTS_AT[point.place]:
            drawn -= self.chances.get(fault, 0.0)
            if drawn < 0:
                return fault
        return None


@dataclass(frozen=True, slots=True)
class Step:
    """One named fault."""

    fault: Fault
    place: Place = Place.SEND
    message: str = ""
    """A message's tag: ``nth`` counts these alone."""
    nth: int = 0
    link: int | None = 0
    """None: each."""
    side: Side | None = None
    """None: either."""

    def is_at(self, point: Point) -> bool:
        nth = point.nth_of_message if self.message else point.nth
        return (
            (self.place, self.nth) == (point.place, nth)
            and self.message in ("", point.message)
            and self.link in (None, point.link)
            and self.side in (None, point.side)
        )


@dataclass(frozen=True, slots=True)
class Script:
    """Exactly the faults that are listed."""

    steps: Sequence[Step]

    def __call__(self, point: Point, random: Random) -> Fault | None:
        return next((step.fault for step in self.steps if step.is_at(point)), None)


class Faults:
    """What befalls a set of links; shared by both sides or one each."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        delay_s: float = 0.05,
        from_start: bool = False,
    ) -> None:
        """``delay_s``: what is late is late by up to this long."""
        self.clock = clock
        self.delay_s = delay_s
        self.from_start = from_start
        self.counters: Counter[Fault] = Counter()
        """Faults that happened."""
        self._schedule = schedule
        self._seed = seed
        self._healed = False
        self._lock = threading.Lock()
        self._links: Counter[Side] = Counter()
        self._frames: dict[Side, deque[bytes]] = {side: deque(maxlen=_FRAMES_KEPT) for side in Side}
        self._slabs: deque[bytes] = deque(maxlen=_SLABS_KEPT)

    def heal(self) -> None:
        """Nothing goes wrong from now on; what is late or silent already stays so."""
        self._healed = True

    def number(self, side: Side) -> tuple[int, Random]:
        """The number of a new link, and what it draws from."""
        with self._lock:
            number = self._links[side]
            self._links[side] += 1
        return number, Random(f"{self._seed} {side} {number}")

    def decide(self, point: Point, random: Random) -> Fault | None:
        fault = self._schedule(point, random)
        if fault is None or self._healed:
            return None
        with self._lock:
            self.counters[fault] += 1
        return fault

    def swap_frame(self, side: Side, frame: bytes, random: Random) -> bytes:
        """Remember a frame; one of those remembered."""
        frames = self._frames[side]
        with self._lock:
            frames.append(frame)
            return frames[random.randrange(len(frames))]

    def swap_slab(self, data: bytes, random: Random) -> bytes:
        """Remember the bytes of a push; those of one remembered."""
        with self._lock:
            old = self._slabs[random.randrange(len(self._slabs))] if self._slabs else data
            self._slabs.append(data)
            return old


class LinkFaults:
    """What befalls one side of one link."""

    def __init__(self, faults: Faults, side: Side) -> None:
        self.faults = faults
        self.side = side
        self.number, self.random = faults.number(side)
        self._counts: Counter[tuple[Place, str]] = Counter()

    def fault_at(self, place: Place, message: str = "") -> Fault | None:
        nth, nth_of_message = self._counts[place, ""], self._counts[place, message]
        self._counts[place, ""] += 1
        if message:
            self._counts[place, message] += 1
        point = Point(self.side, self.number, place, nth, message, nth_of_message)
        return self.faults.decide(point, self.random)

    def late(self) -> float:
        return self.faults.clock() + self.random.uniform(0.1, 1.0) * self.faults.delay_s


def flip(data: memoryview, random: Random) -> None:
    """Invert one bit. Some is left as it is when there is none."""
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
