"""A link on the virtual clock: an ordered control channel and a data path, without a socket or a
wait.

The data path is of a kind that a schedule draws: shared memory, which the receiver reads in place;
pushed, whose bytes leave the sender's slab only when they arrive, so that whoever touches it
earlier is found out; or pulled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from kv_sim.clock import NEVER, Actor
from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kernels.kv_pack.progress import WORD_BYTES, progress_words
from kvferry.kv_transfer.messages import MAX_FRAME

if TYPE_CHECKING:
    from kv_sim.world import World


class Path(Enum):
    """Kinds of data path."""

    SHARED = auto()
    PUSHED = auto()
    PULLED = auto()


@dataclass(slots=True)
class Transit:
    """Bytes on their way."""

    grant: int
    nbytes: int


class Wire:
    """What both ends of a link share."""

    def __init__(self, world: World, path: Path) -> None:
        self.agenda, self.pace, self.path = world.agenda, world.pace, path
        self.world = world
        self.closed = False
        self.ends: list[SimChannel] = []
        self.slab_bytes = 0
        self.sent = self.received = memoryview(b"")
        self.words: list[memoryview] = []
        self.transit: dict[int, Transit] = {}
        """By slab: pushed and not yet there."""
        self.arrived: dict[int, Transit] = {}
        self.posted: dict[int, Transit] = {}
        """By slab: receives that wait for their push (pulled paths)."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for end in self.ends:
                end.wake()

    def open(self, num_slabs: int, slab_bytes: int) -> None:
        if not self.slab_bytes:
            self.slab_bytes = slab_bytes
            self.received = memoryview(bytearray(num_slabs * slab_bytes))
            shared = self.path is Path.SHARED
            self.sent = self.received if shared else memoryview(bytearray(num_slabs * slab_bytes))
            self.words = progress_words(memoryview(bytearray(num_slabs * WORD_BYTES)))

    def land(self, slab: int, transit: Transit) -> None:
        """The bytes of a push arrive, unless another push took its place."""
        if self.closed or self.transit.get(slab) is not transit:
            return
        del self.transit[slab]
        begin = slab * self.slab_bytes
        part = slice(begin, begin + transit.nbytes)
        self.received[part] = self.sent[part]
        self.arrived[slab] = transit
        for end in self.ends:
            end.wake()


class SimSlabs:
    """Outlet and inlet of one wire."""

    is_device = False

    def __init__(self, wire: Wire, memory: memoryview) -> None:
        self._wire = wire
        self._memory = memory
        self.is_pulled = wire.path is Path.PULLED

    def slab(self, index: int) -> memoryview:
        size = self._wire.slab_bytes
        return self._memory[index * size : (index + 1) * size]

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        wire = self._wire
        self._check()
        if wire.path is Path.SHARED:
            return
        lands = not wire.world.slab_sticks()
        partner = wire.posted.pop(slab, None) if self.is_pulled else Transit(grant, nbytes)
        if slab in wire.transit or partner != Transit(grant, nbytes):
            # Only a Pull that is played again asks for that; such a push waits for ever.
            if not wire.world.faults.counters:
                raise AssertionError(f"slab {slab} is pushed under {grant} out of turn")
            lands = False
        transit = wire.transit[slab] = Transit(grant, nbytes)
        if lands:
            takes_s = wire.pace.link_s() + wire.world.meddling.in_flight()
            wire.agenda.after(takes_s, wire.land, slab, transit)

    @property
    def is_followed(self) -> bool:
        return self._wire.path is Path.SHARED

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return self._wire.words[slab] if self.is_followed else None

    def in_flight(self, slab: int) -> bool:
        self._check()
        return slab in self._wire.transit

    def grant(self, slab: int, grant: int) -> None:
        self._wire.arrived.pop(slab, None)

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        self._check()
        if slab in self._wire.posted:
            raise AssertionError(f"slab {slab} is pulled twice")
        self._wire.posted[slab] = Transit(grant, nbytes)

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        self._check()
        if self._wire.path is Path.SHARED:
            return True
        return self._wire.arrived.get(slab) == Transit(grant, nbytes)

    def close(self) -> None:
        self._wire.close()

    def _check(self) -> None:
        if self._wire.closed:
            raise LinkLost("the path broke")


class SimChannel:
    """One end of a link. Receiving never waits."""

    transport = "sim"

    def __init__(self, wire: Wire) -> None:
        self.actor: Actor | None = None
        self.inbox: deque[bytes] = deque()
        self.peer: SimChannel = self
        self._wire = wire
        self._last_s = 0.0
        wire.ends.append(self)

    def send(self, frame: bytes, timeout_s: float) -> None:
        wire = self._wire
        if wire.closed:
            raise LinkLost("the peer closed the link")
        # In order, as a stream is; the peer reads it in its own time.
        self._last_s = max(self._last_s, wire.agenda.now + wire.pace.link_s())
        wire.agenda.at(self._last_s, self.peer.arrive, frame)

    def arrive(self, frame: bytes) -> None:
        if not self._wire.closed:
            self.inbox.append(frame)
            self.wake()

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        if self.inbox:
            frame = self.inbox.popleft()
            if not 0 < len(frame) <= limit:
                raise ProtocolError(f"frame of {len(frame)} bytes; the limit is {limit}")
            return frame
        if self._wire.closed:
            raise LinkLost("the peer closed the link")
        return None

    def pump(self) -> float:
        """Nothing is late here."""
        return NEVER

    def wake(self) -> None:
        if self.actor is not None:
            self.actor.wake()

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> SimSlabs:
        self._wire.open(num_slabs, slab_bytes)
        return SimSlabs(self._wire, self._wire.received)

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> SimSlabs:
        self._wire.open(num_slabs, slab_bytes)
        return SimSlabs(self._wire, self._wire.sent)

    def close(self) -> None:
        self._wire.close()


def make_link(wire: Wire) -> tuple[SimChannel, SimChannel]:
    """(the sender's end, the receiver's end)"""
    ours, theirs = SimChannel(wire), SimChannel(wire)
    ours.peer, theirs.peer = theirs, ours
    return ours, theirs
