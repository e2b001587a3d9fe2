"""Keeps workers alive: one that dies is started again, and the router is told where."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from kvferry.core.errors import StartupError

log = logging.getLogger(__name__)

MAX_FAILED_RESTARTS = 5
FIRST_DELAY_S = 0.5


class Supervised(Protocol):
    """What the supervisor needs of a worker."""

    worker_id: str
    address: str

    async def ended(self) -> str:
        """Wait until it is no more. Returns why."""
        ...


W = TypeVar("W", bound=Supervised)


class Supervisor(Generic[W]):
    """Watches workers until cancelled. ``restart`` starts a dead one again, raising
    StartupError.
    """

    def __init__(
        self,
        workers: Sequence[W],
        restart: Callable[[W], Awaitable[None]],
        moved: Callable[[str, str], None],
        report: Callable[[str], None],
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self._workers = workers
        self._restart = restart
        self._moved = moved
        self._report = report
        self._first_delay_s = first_delay_s

    async def run(self) -> None:
        """Raises StartupError when a worker cannot be brought back."""
        watches = [asyncio.create_task(self._watch(worker)) for worker in self._workers]
        try:
            # Not a TaskGroup: its exception group would hide which error this is.
            await asyncio.gather(*watches)
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, worker: W) -> None:
        while True:
            reason = await worker.ended()
            self._report(f"{worker.worker_id} died: {reason}; starting it again")
            old_address = worker.address
            await self._bring_back(worker)
            self._moved(old_address, worker.address)
            self._report(f"{worker.worker_id} is back at {worker.address}")

    async def _bring_back(self, worker: W) -> None:
        delay_s = self._first_delay_s
        for failures in range(1, MAX_FAILED_RESTARTS + 1):
            try:
                return await self._restart(worker)
            except StartupError as error:
                log.error("%s: restart %d failed: %s", worker.worker_id, failures, error)
                await asyncio.sleep(delay_s)
                delay_s *= 2
        raise StartupError(
            f"{worker.worker_id} could not be started again in {MAX_FAILED_RESTARTS} tries"
        )
