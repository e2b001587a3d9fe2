"""The receiver's side of a probe: whose turn it is, and what is measured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import xxhash

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


def sample_digest(slab: Slab, is_device: bool) -> int:
    """xxh3-64 of a slab's bytes."""
    data: Any = slab.cpu().numpy() if is_device else slab
    value: int = xxhash.xxh3_64_intdigest(data)
    return value
