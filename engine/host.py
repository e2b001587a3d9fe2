"""Runs a step loop on a thread of its own and serves its sessions."""

from __future__ import annotations

import asyncio
import threading

from kvferry.engine.loop import StepLoop
from kvferry.engine.session import SessionServer


class LoopThread:
    """The step loop's thread. A defect in it ends the worker: ``crashed`` says so."""

    def __init__(self, loop: StepLoop, name: str) -> None:
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name=name)
        self._ended = asyncio.Event()
        self._asyncio = asyncio.get_running_loop()
        self._error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        self._loop.stop()
        await asyncio.to_thread(self._thread.join)

    async def ended(self) -> None:
        """Return when the loop was stopped; raise what it died of when it crashed."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self._error = error
        finally:
            self._asyncio.call_soon_threadsafe(self._ended.set)


class WorkerHost:
    """One worker's threads and servers, started and stopped together."""

    def __init__(self, loop: StepLoop, server: SessionServer, name: str) -> None:
        self.loop = loop
        self._server = server
        self._name = name
        self._thread: LoopThread | None = None

    async def start(self) -> str:
        """Returns the session address, HOST:PORT."""
        self._thread = LoopThread(self.loop, self._name)
        self._thread.start()
        return await self._server.start()

    async def stop(self) -> None:
        """Sessions first: with them end their sequences; then the loop."""
        await self._server.stop()
        if self._thread is not None:
            await self._thread.stop()

    async def ended(self) -> None:
        """Return when stopped; raise what the step loop died of."""
        assert self._thread is not None, "not started"
        await self._thread.ended()
