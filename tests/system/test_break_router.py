"""The router under random cancels, cut sessions, busy and replaced workers and a second router:
every finished answer is right, and every count goes back to zero.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial

import pytest
from fake_engine_model import VOCAB_SIZE, expected
from gates import HoldAt, eventually
from local_system import (
    LocalDial,
    LocalStream,
    LocalSystem,
    Worker,
    fake_backend,
    local_config,
    local_system,
)
from second_router import second_router

from kvferry.core.errors import Unavailable
from kvferry.engine.backend import Backend
from kvferry.router.dispatcher import BUSY_PAUSE_S
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.workers import Role

pytestmark = pytest.mark.slow

LAYOUTS = {
    "1P1D": {"prefill": {"workers": 1}, "decode": {"workers": 1}},
    "2P2D": {"prefill": {"workers": 2}, "decode": {"workers": 2, "block_size": 8}},
    "both": {"prefill": {"workers": 0}, "decode": {"workers": 2, "role": "both"}},
}


def counts(router: Router) -> list[tuple[int, int, int, int]]:
    """(prompt tokens, reservations, leases, mailboxes) that the router counts on each worker."""
    return [
        (s.view.prefill_tokens, s.view.reserving, s.view.active, len(s._mailboxes))
        for s in router._dispatcher.sessions
    ]


def is_idle(router: Router) -> bool:
    status = router.status()
    return not any(map(any, counts(router))) and status.queued == status.running == 0


@dataclass(slots=True)
class Chaos:
    """Clients of one router, and what befalls them."""

    system: LocalSystem
    rng: random.Random
    finished: int = 0
    failed: int = 0

    async def client(self) -> None:
        rng = self.rng
        length = rng.choice([1, 3, 4, 5, 15, 16, 17, 40])
        prompt = [rng.randrange(4) for _ in range(length)]
        max_tokens = rng.choice([1, 2, 5, 25])
        while not await self.try_once(prompt, max_tokens):
            await asyncio.sleep(0.02)

    async def try_once(self, prompt: list[int], max_tokens: int) -> bool:
        tokens: list[int] = []
        try:
            async with aclosing(self.system.stream(prompt, max_tokens=max_tokens)) as steps:
                async for step in steps:
                    tokens += step.token_ids
                    assert tokens == expected(prompt, max_tokens)[: len(tokens)]
        except Unavailable:
            self.failed += 1
            return False
        assert len(tokens) == max_tokens
        self.finished += 1
        return True

    async def client_that_may_go(self) -> None:
        task = asyncio.create_task(self.client())
        await asyncio.sleep(self.rng.random() * 0.2)
        if self.rng.random() < 0.5:
            # Counted in turns of the event loop, a cancel finds every await there is.
            for _ in range(self.rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def trouble(self) -> None:
        """Sessions break; now and then a worker moves to another address."""
        dial, rng = self.system.dial, self.rng
        for number in range(12):
            await asyncio.sleep(rng.random() * 0.05)
            address = rng.choice(sorted(dial.streams))
            if rng.random() < 0.3:
                moved = f"{address.split('@')[0]}@{number}"
                dial.workers[moved] = dial.workers.pop(address)
                stream = dial.streams.pop(address)
                self.system.router.replace(address, moved)
                stream.cut()
            else:
                dial.streams[address].cut()
            await eventually(lambda: len(dial.streams) == len(dial.workers))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_blocks", [24, 128])
async def test_counts_return_to_zero_whatever_happens(
    layout: str, num_blocks: int, seeded: int
) -> None:
    rng = random.Random(seeded)
    config = local_config(**LAYOUTS[layout], router={"max_attempts": 6})
    async with local_system(
        config, lambda size: fake_backend(size, num_blocks=num_blocks)
    ) as system:
        parts = [Chaos(system, rng)]
        async with second_router(system) as (other, _):
            parts.append(Chaos(other, rng))
            for part in parts:
                part.system.dial.workers = dict(system.workers)
            await asyncio.gather(
                *(part.client_that_may_go() for part in parts for _ in range(40)),
                *(part.trouble() for part in parts),
            )
            for part in parts:
                await eventually(lambda r=part.system.router: is_idle(r), what="idle")
                await part.system.router.wait_ready(20)
            await system.settled()
            for part in parts:
                while not await part.try_once([1] * 9, 8):
                    await asyncio.sleep(0.02)  # the last cut may be noticed only now
                assert is_idle(part.system.router)
        assert sum(part.finished for part in parts) > 20
        await system.settled()
        assert len(system.router._index) <= num_blocks * len(system.workers)


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_cancel_after_any_number_of_turns_leaves_nothing(turns: int) -> None:
    async with local_system(local_config()) as system:
        for extra in range(3):
            prompt = [turns + extra, 2, 3, 4, 5]
            task = asyncio.create_task(system.generate(prompt, max_tokens=3))
            for _ in range(turns + extra):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert is_idle(system.router)
        await system.settled()
        assert await system.generate([VOCAB_SIZE - 1]) == expected([VOCAB_SIZE - 1], 8)


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_busy_worker_is_not_asked_in_a_hot_loop(workers: int) -> None:
    """Two requests that find every prefill worker busy would wake each other without end."""
    gate = HoldAt("waiting")
    config = local_config(
        prefill={"workers": workers, "max_batch_tokens": 512}, decode={"block_size": 8}
    )
    backend = partial(one_prompt_at_a_time, prefill_block_size=4)
    async with local_system(config, backend, prefill_gate=gate) as system:
        first = [
            asyncio.create_task(system.generate([i] * 50, max_tokens=2)) for i in range(workers)
        ]
        parts = [w.role.sequences for name, w in system.workers.items() if "prefill" in name]
        await eventually(lambda: all(len(sequences) for sequences in parts))
        async with second_router(system) as (other, dial):
            rest = [asyncio.create_task(other.generate([i] * 20, max_tokens=2)) for i in (7, 8)]
            await eventually(lambda: len(dial.sent) >= 2 * (1 + workers))
            asked = len(dial.sent)
            await asyncio.sleep(0.5)
            assert len(dial.sent) - asked <= 2 * workers * 0.5 / BUSY_PAUSE_S
            gate.open()
            assert await asyncio.gather(*rest) == [expected([i] * 20, 2) for i in (7, 8)]
            await asyncio.gather(*first)
            assert is_idle(other.router)


async def test_a_request_with_blocks_does_not_wait_for_one_that_waits_for_them() -> None:
    """The first is busy at prefill and moves; the next has claimed that worker's look-ahead and
    waits for the decode side's blocks, which the first one holds.
    """
    gate = HoldAt("waiting")
    config = local_config(prefill={"max_batch_tokens": 64}, decode={"block_size": 8})
    backend = partial(one_prompt_at_a_time, prefill_block_size=4, others=9)
    async with local_system(config, backend, prefill_gate=gate) as system:
        parts = system.workers["prefill-0"].role.sequences
        async with second_router(system) as (other, _):
            first = asyncio.create_task(other.generate([1] * 50, max_tokens=1))
            await eventually(lambda: len(parts) == 1)
            rest = [asyncio.create_task(system.generate([i] * 64, max_tokens=2)) for i in (2, 3)]
            view = system.router._dispatcher.sessions[0].view
            await eventually(lambda: view.prefill_tokens > 0 and system.held() > 13)
            await asyncio.sleep(0.1)
            gate.open()
            async with asyncio.timeout(10):
                assert await asyncio.gather(*rest) == [expected([i] * 64, 2) for i in (2, 3)]
            await first
            assert is_idle(system.router)


def one_prompt_at_a_time(block_size: int, prefill_block_size: int, others: int = 64) -> Backend:
    return fake_backend(block_size, num_blocks=16 if block_size == prefill_block_size else others)


async def test_colocated_workers_that_are_gone_are_named() -> None:
    config = local_config(prefill={"workers": 0}, decode={"role": "both"})
    async with local_system(config) as system:
        system.dial.workers = {}
        system.dial.streams["both-0"].cut()
        await eventually(lambda: not system.router.ready()[0])
        assert system.router.ready()[1].startswith("no worker: both-0 ")


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0", "both-0"])
async def test_a_request_outlives_the_restart_of_its_only_worker(worker: str) -> None:
    """A worker takes seconds to load its model, far longer than a few quick attempts."""
    gate = HoldAt("prefilling" if worker == "both-0" else "decoding")
    sections = {"prefill": {"workers": 0}, "decode": {"role": "both"}} if "both" in worker else {}
    async with local_system(local_config(**sections), decode_gate=gate) as system:
        prompt = list(range(30))
        answer = asyncio.create_task(system.generate(prompt, max_tokens=20))
        await gate.reached()
        workers = system.dial.workers
        system.dial.workers = {}
        for stream in system.dial.streams.values():
            stream.cut()
        gate.open()
        await eventually(lambda: not system.router.ready()[0])
        await asyncio.sleep(1.0)  # four attempts without a pause to speak of would be over
        assert not answer.done()
        assert is_idle(system.router) or system.router.status().running == 1
        system.dial.workers = workers
        assert await answer == expected(prompt, 20)
        await eventually(lambda: is_idle(system.router))
        await system.settled()


class Unanswered(LocalDial):
    """Where no worker is, nobody refuses either."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        super().__init__(workers)
        self.tries: list[str] = []

    async def __call__(self, address: str) -> LocalStream:
        self.tries.append(address)
        while address not in self.workers:
            await asyncio.Event().wait()
        return await super().__call__(address)


async def test_a_session_follows_a_moved_worker_and_does_not_wait_for_its_old_address() -> None:
    async with local_system(local_config()) as system:
        dial = Unanswered(dict(system.workers))
        router = Router(system.config, dial)
        router.connect([WorkerAddress(Role(name.split("-")[0]), name) for name in dial.workers])
        await router.wait_ready(20)
        dial.workers["decode-9"] = dial.workers.pop("decode-0")
        dial.streams["decode-0"].cut()
        await eventually(lambda: dial.tries.count("decode-0") == 2)
        router.replace("decode-0", "decode-9")
        await router.wait_ready(20)
        await router.close()
