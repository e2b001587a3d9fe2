"""Runs a server until it is told to stop.

start-up ──first signal──▶ cancelled, cleaned up
serving  ──first signal──▶ drain: requests in flight finish, then workers stop
draining ──second signal─▶ stopped at once
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from kvferry.core.errors import Cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Serving(Protocol):
    """A system that answers requests."""

    @property
    def grpc_address(self) -> str: ...

    @property
    def http_address(self) -> str: ...

    async def wait(self) -> None:
        """Return or raise when the system ends by itself."""
        ...


class StopSignals:
    """Counts the operator's wishes to stop and turns them into events of the running task."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked = asyncio.Event()
        self.serving = False
        self._say = say
        self._task = asyncio.current_task()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.receive)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def receive(self) -> None:
        first = not self.asked.is_set()
        self.asked.set()
        if first and self.serving:
            self._say("stopping: requests in flight may finish; again to stop at once")
            return
        self._say("stopping at once")
        if self._task is not None:
            self._task.cancel()


async def serve_until_stopped(
    system: AbstractAsyncContextManager[Serving],
    ready: Callable[[Serving], None],
    say: Callable[[str], None],
) -> None:
    """Enter ``system``, report it ready, leave it at the first signal or when it ends by itself.

    Raises Cancelled when it was stopped before it was ready or without draining, and what the
    system raises.
    """
    signals = StopSignals(say)
    with signals.installed():
        try:
            async with system as serving:
                signals.serving = True
                ready(serving)
                await _first_of(serving.wait(), signals.asked.wait())
        except asyncio.CancelledError:
            if not signals.asked.is_set():
                raise
            raise Cancelled("stopped before it was done") from None


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
