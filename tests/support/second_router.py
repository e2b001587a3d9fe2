"""A further router on the workers of a local system, which notes what it tells them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from local_system import LocalDial, LocalStream, LocalSystem

from kvferry.proto import worker_pb2 as pb
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.workers import Role


class NotingDial(LocalDial):
    """Remembers every message to each worker, beats left out."""

    def __init__(self, system: LocalSystem) -> None:
        super().__init__(system.workers)
        self.sent: list[tuple[str, pb.RouterMessage]] = []

    async def __call__(self, address: str) -> LocalStream:
        stream = NotingStream(self, address)
        self.streams[address] = stream
        return stream

    def kinds(self, worker: str) -> list[str]:
        return [m.WhichOneof("kind") or "" for name, m in self.sent if name == worker]


class NotingStream(LocalStream):
    def __init__(self, dial: NotingDial, name: str) -> None:
        super().__init__(dial.workers[name])
        self._dial = dial
        self._name = name

    async def write(self, message: pb.RouterMessage) -> None:
        if message.WhichOneof("kind") not in ("hello", "renew"):
            self._dial.sent.append((self._name, message))
        await super().write(message)


@asynccontextmanager
async def second_router(system: LocalSystem) -> AsyncIterator[tuple[LocalSystem, NotingDial]]:
    """The same workers behind another router."""
    dial = NotingDial(system)
    router = Router(system.config, dial)
    router.connect([WorkerAddress(Role(name.split("-")[0]), name) for name in system.workers])
    beats = asyncio.create_task(dial.beat(system.config.cluster.beat_s))
    try:
        await router.wait_ready(20)
        yield LocalSystem(system.config, router, system.workers, dial), dial
    finally:
        beats.cancel()
        await router.close()
