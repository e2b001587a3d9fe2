"""A gate that takes a request's blocks at a chosen step."""

from __future__ import annotations

from kvferry.core.ids import AttemptKey
from kvferry.engine.ports import Relief


class PreemptAt:
    """Takes the blocks of the next request once, before it computes on from ``computed`` tokens."""

    shut = True

    def __init__(self, relief: Relief) -> None:
        self._relief = relief
        self._computed: int | None = None
        self.num_taken = 0

    def arm(self, computed: int) -> None:
        """For the next request, as soon as so many of its tokens have KV."""
        self._computed = computed

    def holds(self, state: str, key: AttemptKey) -> bool:
        return False

    def preempts(self, key: AttemptKey, computed: int, length: int) -> Relief | None:
        if self._computed is None or computed < self._computed:
            return None
        self._computed = None
        self.num_taken += 1
        return self._relief
