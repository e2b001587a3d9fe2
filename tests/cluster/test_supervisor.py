from __future__ import annotations

import asyncio

import pytest

from kvferry.cluster.supervisor import Supervisor
from kvferry.core.errors import StartupError


class FakeWorker:
    """Dies when told to; each start gives it another address."""

    def __init__(self, name: str) -> None:
        self.worker_id = name
        self.address = f"{name}:0"
        self.starts = 0
        self.failing = 0
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def ended(self) -> str:
        return await self._death

    def die(self) -> None:
        self._death.set_result("killed")

    async def start(self) -> None:
        if self.failing:
            self.failing -= 1
            raise StartupError("no room")
        self.starts += 1
        self.address = f"{self.worker_id}:{self.starts}"
        self._death = asyncio.get_running_loop().create_future()


def supervise(*workers: FakeWorker) -> tuple[asyncio.Task[None], list[tuple[str, str]]]:
    moves: list[tuple[str, str]] = []
    supervisor = Supervisor(
        workers,
        restart=lambda worker: worker.start(),
        moved=lambda old, new: moves.append((old, new)),
        report=lambda text: None,
        first_delay_s=0.001,
    )
    return asyncio.create_task(supervisor.run()), moves


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_dead_worker_is_started_again_and_the_router_told_where() -> None:
    first, second = FakeWorker("prefill-0"), FakeWorker("decode-0")
    task, moves = supervise(first, second)
    for life in range(2):
        first.die()
        await until(lambda life=life: len(moves) == life + 1)
    assert moves == [("prefill-0:0", "prefill-0:1"), ("prefill-0:1", "prefill-0:2")]
    assert second.starts == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_restarts_that_fail_are_tried_again() -> None:
    worker = FakeWorker("decode-0")
    worker.failing = 3
    task, moves = supervise(worker)
    worker.die()
    await until(lambda: moves)
    assert worker.starts == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_does_not_come_back_ends_the_system() -> None:
    worker = FakeWorker("decode-0")
    worker.failing = 1000
    task, _ = supervise(worker)
    worker.die()
    with pytest.raises(StartupError, match="decode-0 could not be started again"):
        await asyncio.wait_for(task, 10)
