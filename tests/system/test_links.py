"""Prefill workers measure their ways to decode workers; requests do not wait for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_engine_model import expected
from gates import eventually
from local_system import SECRET, LocalSystem, fake_backend, local_config, local_system
from second_router import second_router

from kvferry.core.errors import LinkRefused
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.host import LoopThread
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.transport import Channel
from kvferry.proto.kvferry_pb2 import LinkStatus

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 43))
CONFIG = local_config(transfer={"probe": True, "transport": "auto"})


class ProbesWait:
    """A Connect through which probes come when they are let, and transfers always."""

    def __init__(self) -> None:
        self.num_probes = 0
        self._open = threading.Event()

    def __call__(self, endpoint: str, timeout_s: float) -> Channel:
        if threading.current_thread().name == "kv-prober":
            assert self._open.wait(30)
            self.num_probes += 1
        return connect(endpoint, timeout_s)

    def open(self) -> None:
        self._open.set()


def ways(links: list[LinkStatus]) -> list[tuple[str, str, str]]:
    return [(link.prefill_worker, link.decode_worker, link.transport) for link in links]


async def test_requests_do_not_wait_for_what_is_measured() -> None:
    probes = ProbesWait()
    async with local_system(CONFIG, connect=probes) as system:
        assert await system.router.wait_links(0.01) == []
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        assert system.timelines[0].transfer_transport == "shm"
        probes.open()
        links = await system.router.wait_links(20)
        assert ways(links) == [("prefill-0", "decode-0", name) for name in ("shm", "tcp")]
        assert all(link.rate > 0 and link.peak > 0 and not link.reason for link in links)
        assert sum(link.chosen for link in links) == 1
        assert list(system.router.status().links) == links
        assert await system.generate(PROMPT[1:]) == expected(PROMPT[1:], 8)


async def test_a_way_that_cannot_be_used_says_why() -> None:
    def no_shm(endpoint: str, timeout_s: float) -> Channel:
        if endpoint.startswith("shm:"):
            raise LinkRefused("the other host's memory is out of reach")
        return connect(endpoint, timeout_s)

    async with local_system(CONFIG, connect=no_shm) as system:
        shm, tcp = await system.router.wait_links(20)
        assert (shm.chosen, shm.rate, tcp.chosen) == (False, 0.0, True)
        assert shm.reason == "the other host's memory is out of reach"
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        assert system.timelines[0].transfer_transport == "tcp"


async def test_every_pair_is_measured_once_whoever_asks() -> None:
    config = local_config(
        prefill={"workers": 2}, decode={"workers": 2}, transfer={"probe": True, "transport": "tcp"}
    )
    probes = ProbesWait()
    probes.open()
    async with local_system(config, connect=probes) as system:
        links = await system.router.wait_links(20)
        pairs = [(f"prefill-{p}", f"decode-{d}", "tcp") for p in (0, 1) for d in (0, 1)]
        assert ways(links) == pairs
        assert all(link.chosen for link in links)
        assert probes.num_probes == 4
        async with second_router(system) as (other, _):
            assert ways(await other.router.wait_links(20)) == pairs
        assert probes.num_probes == 4


async def test_a_decode_worker_that_was_started_again_is_measured_again() -> None:
    """B006: what was known of its earlier life is forgotten."""
    probes = ProbesWait()
    probes.open()
    async with local_system(CONFIG, connect=probes) as system:
        await system.router.wait_links(20)
        assert await system.generate(PROMPT) == expected(PROMPT, 8)
        before = probes.num_probes
        async with successor(system, "decode-0"):
            await eventually(lambda: probes.num_probes == before + 2)
            links = await system.router.wait_links(20)
            assert len(ways(links)) == 2
            follow_up = [*PROMPT, 1]
            assert await system.generate(follow_up) == expected(follow_up, 8)
            assert system.timelines[-1].attempts == 1


@asynccontextmanager
async def successor(system: LocalSystem, name: str) -> AsyncIterator[None]:
    """In the place of a decode worker that died."""
    worker = DecodeWorker(name, system.config, fake_backend(4), SECRET)
    thread = LoopThread(worker.loop, name)
    thread.start()
    await asyncio.to_thread(system.workers[name].close_kv)
    system.dial.workers = {**system.dial.workers, name: worker}
    system.dial.streams[name].cut()

    try:
        yield
    finally:
        await thread.stop()
        await asyncio.to_thread(worker.close_kv)
