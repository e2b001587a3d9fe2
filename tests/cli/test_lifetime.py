from __future__ import annotations

import asyncio
import signal
from types import TracebackType

import pytest

from kvferry.cli.lifetime import Serving, serve_until_stopped
from kvferry.core.errors import Cancelled, StartupError


class FakeSystem:
    """Starts when it is let, drains when it is let, and remembers how it ended."""

    grpc_address = "127.0.0.1:1"
    http_address = "127.0.0.1:2"

    def __init__(self) -> None:
        self.may_start = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.draining = asyncio.Event()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.log: list[str] = []

    async def __aenter__(self) -> FakeSystem:
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.log.append("start cancelled")
            raise
        self.log.append("started")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self.draining.set()
        try:
            await self.may_stop.wait()
            self.log.append("drained")
        except asyncio.CancelledError:
            self.log.append("forced")
            raise

    async def wait(self) -> None:
        await self.ended


class Session:
    """One run of ``serve_until_stopped`` over a fake system."""

    def __init__(self) -> None:
        self.system = FakeSystem()
        self.ready = asyncio.Event()
        self.said: list[str] = []
        self.run = asyncio.create_task(
            serve_until_stopped(self.system, self.on_ready, self.said.append)
        )

    def on_ready(self, serving: Serving) -> None:
        assert serving is self.system
        self.ready.set()


async def serving_session() -> Session:
    session = Session()
    session.system.may_start.set()
    async with asyncio.timeout(5):
        await session.ready.wait()
    return session


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_drains(number: signal.Signals) -> None:
    session = await serving_session()
    signal.raise_signal(number)
    async with asyncio.timeout(5):
        await session.system.draining.wait()
        assert not session.run.done()
        session.system.may_stop.set()
        await session.run
    assert session.system.log == ["started", "drained"]
    assert session.said == ["stopping: requests in flight may finish; again to stop at once"]


async def test_the_second_signal_forces() -> None:
    session = await serving_session()
    signal.raise_signal(signal.SIGINT)
    async with asyncio.timeout(5):
        await session.system.draining.wait()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Cancelled):
            await session.run
    assert session.system.log == ["started", "forced"]


async def test_a_signal_during_start_up_ends_it() -> None:
    session = Session()
    await asyncio.sleep(0)
    signal.raise_signal(signal.SIGTERM)
    async with asyncio.timeout(5):
        with pytest.raises(Cancelled):
            await session.run
    assert session.system.log == ["start cancelled"]


async def test_a_system_that_ends_by_itself_is_left() -> None:
    session = await serving_session()
    session.system.may_stop.set()
    session.system.ended.set_result(None)
    async with asyncio.timeout(5):
        await session.run
    assert session.system.log == ["started", "drained"]


async def test_a_system_that_fails_says_why() -> None:
    session = await serving_session()
    session.system.may_stop.set()
    session.system.ended.set_exception(StartupError("prefill-0 cannot come back"))
    async with asyncio.timeout(5):
        with pytest.raises(StartupError, match="prefill-0"):
            await session.run
    assert session.system.log == ["started", "drained"]


async def test_a_cancelled_caller_stays_cancelled() -> None:
    session = await serving_session()
    session.system.may_stop.set()
    session.run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await session.run
    assert session.system.log == ["started", "drained"]
