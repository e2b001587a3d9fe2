"""What a receiver counts: read by metrics, while its links' threads write."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

from kvferry.kv_transfer.jobs import Reason


class Tally(StrEnum):
    """What happened that is no failure."""

    RESEND = "resend"
    """A slab came damaged and was asked for again."""
    GAP = "gap"
    """Headers must have been lost, and were asked for again."""
    WAIT = "wait"
    """A slab found another one of its lease being scattered."""
    FOLLOWED = "followed"
    """A slab was scattered while it was filled."""
    PROBE = "probe"
    """Slabs of probes."""
    PROBE_DAMAGED = "probe_damaged"
    LINK = "link"
    """Links opened."""
    LINK_LOST = "link_lost"
    """Links that ended while this side would have gone on, those replaced and retired included."""
    LINK_REPLACED = "link_replaced"
    """Links closed since the same rank of the same peer opened another one."""
    LINK_RETIRED = "link_retired"
    """Links closed to give their slab memory to another one."""


class Counters:
    """Safe to call from any thread; what it returns are copies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dropped: Counter[Reason] = Counter()
        self._tallies: Counter[Tally] = Counter()

    @property
    def dropped(self) -> Counter[Reason]:
        """Offers and slabs that were not taken, by reason."""
        with self._lock:
            return self._dropped.copy()

    @property
    def tallies(self) -> Counter[Tally]:
        with self._lock:
            return self._tallies.copy()

    def drop(self, reason: Reason) -> None:
        with self._lock:
            self._dropped[reason] += 1

    def tally(self, what: Tally) -> None:
        with self._lock:
            self._tallies[what] += 1
