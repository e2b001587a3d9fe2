"""The receiver's side of a probe: whose turn it is, and what is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import xxhash

from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.counters import Counters, Tally
from kvferry.kv_transfer.grants import Grants
from kvferry.kv_transfer.messages import PROBE_LEASE, Ack, Credit, Resend, Sample
from kvferry.kv_transfer.transport import Slab

TURN_S = 2.0
"""How long one link may probe while others wait for their turn."""


class ProbeTurn:
    """One link of a receiver probes at a time: then it measures its path and not the others, and
    transfers lose one probe's share at most. Any thread may call it.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._holder: object | None = None
        self._since_s = 0.0
        self._waiting: dict[object, Callable[[], None]] = {}

    def take(self, link: object, wake: Callable[[], None]) -> bool:
        """Whether it is this link's turn; if not, it is woken when it may be."""
        with self._lock:
            now = self._clock()
            if self._holder is None or (self._holder is not link and now - self._since_s >= TURN_S):
                self._holder, self._since_s = link, now
            if self._holder is link:
                self._waiting.pop(link, None)
                return True
            self._waiting[link] = wake
            return False

    def give_back(self, link: object) -> None:
        """Idempotent."""
        with self._lock:
            self._waiting.pop(link, None)
            if self._holder is not link:
                return
            self._holder = None
            wakes = list(self._waiting.values())
        for wake in wakes:
            wake()


class LinkProbe:
    """What one link owes its peer's probe; all of it belongs to the link's thread."""

    def __init__(
        self, turn: ProbeTurn, grants: Grants, wake: Callable[[], None], is_device: bool
    ) -> None:
        self._turn = turn
        self._grants = grants
        self._wake = wake
        self._is_device = is_device
        self._slabs = 0
        # Where there are two slabs, one stays free for the next transfer.
        self._spare = min(1, grants.num_free - 1)
        self.is_running = False

    def ask(self, slabs: int) -> None:
        """The peer wants so many slabs; what it asked for before is forgotten."""
        self._slabs, self.is_running = slabs, True

    def grant(self) -> list[Credit]:
        """Slabs for it now, if it is this link's turn."""
        credits: list[Credit] = []
        if not self._slabs and not self._grants.count(LeaseId(PROBE_LEASE)):
            self.close()
        elif self._slabs and self._turn.take(self, self._wake):
            while self._slabs and self._grants.num_free > self._spare:
                self._slabs -= 1
                credits.append(self._grants.give(LeaseId(PROBE_LEASE)))
        return credits

    def take_in(self, sample: Sample, counters: Counters) -> Ack | Resend:
        """The answer to a sample whose bytes are here; its slab is free."""
        kind: type[Ack | Resend] = Ack
        if sample.digest:
            digest = sample_digest(self._grants.bytes_of(sample), self._is_device)
            if digest != sample.digest:
                counters.tally(Tally.PROBE_DAMAGED)
                kind = Resend
        counters.tally(Tally.PROBE)
        self._grants.take_back(sample.slab, sample.grant)
        return kind(lease=PROBE_LEASE, index=sample.index, grant=sample.grant)

    def close(self) -> None:
        """Let others have their turn."""
        self.is_running = False
        self._turn.give_back(self)


def sample_digest(slab: Slab, is_device: bool) -> int:
    """xxh3-64 of a slab's bytes."""
    data: Any = slab.cpu().numpy() if is_device else slab
    value: int = xxhash.xxh3_64_intdigest(data)
    return value
