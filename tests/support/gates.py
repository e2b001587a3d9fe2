"""Gates for tests: hold requests in a state, and act once one is there."""

from __future__ import annotations

import asyncio
import threading
import time

from kvferry.core.ids import AttemptKey
from kvferry.engine.ports import Relief


class HoldAt:
    """Holds every request in ``state`` until opened. Records all states it was asked about."""

    shut = True

    def __init__(self, state: str = "") -> None:
        self._state = state
        self._reached = threading.Event()
        self._open = threading.Event()
        self.seen: list[str] = []

    def holds(self, state: str, key: AttemptKey) -> bool:
        if not self.seen or self.seen[-1] != state:
            self.seen.append(state)
        if state != self._state or self._open.is_set():
            return False
        self._reached.set()
        return True

    def preempts(self, key: AttemptKey, computed: int, length: int) -> None:
        return None

    def hold(self, state: str) -> None:
        """From now on hold requests in ``state``."""
        self._state = state

    def open(self) -> None:
        self._open.set()

    async def reached(self, timeout_s: float = 20.0) -> None:
        """Wait until a request is held. Raises AssertionError when none comes."""
        if not await asyncio.to_thread(self._reached.wait, timeout_s):
            raise AssertionError(f"no request reached {self._state}; seen: {self.seen}")


class PreemptEvery:
    """Takes the blocks of every request before each of its decode steps, once per token."""

    shut = True

    def __init__(self, relief: Relief) -> None:
        self.count = 0
        self._relief = relief
        self._done: set[tuple[int, int]] = set()

    def holds(self, state: str, key: AttemptKey) -> bool:
        return False

    def preempts(self, key: AttemptKey, computed: int, length: int) -> Relief | None:
        if (key.request, length) in self._done:
            return None
        self._done.add((key.request, length))
        self.count += 1
        return self._relief


async def eventually(check, timeout_s: float = 20.0, what: str = "") -> None:
    """Wait until ``check()`` is true. Raises AssertionError when it does not become so."""
    deadline = time.monotonic() + timeout_s
    while not check():
        if time.monotonic() > deadline:
            raise AssertionError(f"never became true: {what or check}")
        await asyncio.sleep(0.005)
