"""What others are to be told of a change under a lock, once the lock is free."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

News = list[Callable[[], None]]


class Changing:
    """Holds a lock, and calls what was put on the list after it. Nobody is told of a change that
    raised. For one ``with`` alone.
    """

    __slots__ = ("_lock", "_news")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._news: News = []

    def __enter__(self) -> News:
        self._lock.acquire()
        return self._news

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        if kind is None:
            for tell in self._news:
                tell()
