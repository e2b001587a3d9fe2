"""Workers in processes of their own, killed or stopped in each state of a request: the answer is
right, blocks come back on both sides, nothing is left in shared memory.

Each state is a pause point: the victim says that it holds the request there before it is hit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_engine_model import expected
from gates import eventually
from local_system import SECRET, LocalDial, LocalSystem, local_config
from nursery import Child, Nursery, nursery

from kvferry.proto import kvferry_pb2
from kvferry.router.channel import GrpcDial
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.workers import Role

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROMPT = [(7 * i) % 90 for i in range(37)]
NUM_TOKENS = 9
SILENCE_S = 1.0
CONFIG: dict[str, dict[str, Any]] = {
    "prefill": {"block_size": 4, "max_batch_tokens": 16},
    "decode": {"block_size": 8},
    "transfer": {
        "transport": "shm",
        "push": "whole",
        # Several slabs for a prompt.
        "slab": 512,
        "staging": 8192,
        "progress_timeout_s": SILENCE_S,
    },
    "cluster": {"beat_s": 0.1, "silence_s": SILENCE_S},
}
P_STATES = ["waiting", "prefilling", "transferring"]
D_STATES = ["waiting", "receiving", "reserved", "decoding"]
VICTIMS = [("prefill", state) for state in P_STATES] + [("decode", state) for state in D_STATES]


@dataclass(slots=True)
class Pair:
    """One prefill and one decode process, and routers in this one."""

    name: str
    nursery: Nursery
    children: dict[str, Child]
    systems: list[LocalSystem]

    @property
    def system(self) -> LocalSystem:
        return self.systems[0]

    async def restart(self, role: str) -> Child:
        """Another life of a worker, at another address."""
        old = self.children[role]
        new = await self.nursery.start(role, f"{old.name}'", CONFIG)
        self.children[role] = new
        for system in self.systems:
            system.router.replace(old.address, new.address)
        return new

    def statuses(self) -> list[kvferry_pb2.WorkerStatus]:
        return [w for system in self.systems for w in system.router.status().workers]

    def holds_nothing(self) -> bool:
        return all(
            worker.state == "ready"
            and not worker.blocks.reserved + worker.blocks.in_use + worker.blocks.fenced
            and worker.blocks.free + worker.blocks.cached > 0
            for worker in self.statuses()
        )

    async def at_rest(self) -> None:
        await eventually(self.holds_nothing, what=f"{self.name}: {self.statuses()}")


@asynccontextmanager
async def pair(
    children: Nursery, name: str, holds: dict[str, str], num_routers: int = 1
) -> AsyncIterator[Pair]:
    config = local_config(**CONFIG)
    started = await asyncio.gather(
        *(
            children.start(role, f"{role}-{name}", CONFIG, holds.get(role, ""))
            for role in ("prefill", "decode")
        )
    )
    found = dict(zip(("prefill", "decode"), started, strict=True))
    systems = []
    for _ in range(num_routers):
        router = Router(config, GrpcDial(SECRET, config.cluster.silence_s))
        router.connect([WorkerAddress(Role(role), child.address) for role, child in found.items()])
        systems.append(LocalSystem(config, router, {}, LocalDial({})))
    try:
        for system in systems:
            await system.router.wait_ready(30)
        yield Pair(name, children, found, systems)
    finally:
        for system in systems:
            await system.router.close()


def holds_for(role: str, state: str) -> tuple[dict[str, str], str]:
    """(what is held where, who says that the state is reached)."""
    if state == "receiving":
        # The decode side has got one slab, and waits for the next.
        return {"prefill": "transferring"}, "prefill"
    return {role: state}, role


async def all_of(victims: list[tuple[str, str]], scenario: Callable[..., Awaitable[None]]) -> None:
    """Every victim at once: most of the time of each is waiting."""
    names = set(os.listdir("/dev/shm"))
    async with nursery() as children:
        done = await asyncio.gather(
            *(scenario(children, role, state) for role, state in victims), return_exceptions=True
        )
    failed = {
        victim: error for victim, error in zip(victims, done, strict=True) if error is not None
    }
    assert not failed, failed
    assert set(os.listdir("/dev/shm")) <= names


async def test_a_worker_that_is_killed_in_any_state() -> None:
    await all_of(VICTIMS, kill)


async def kill(children: Nursery, role: str, state: str) -> None:
    holds, speaker = holds_for(role, state)
    async with pair(children, f"{role}-{state}", holds) as workers:
        answer = asyncio.create_task(workers.system.generate(PROMPT, max_tokens=NUM_TOKENS))
        await workers.children[speaker].held.wait()
        assert not answer.done()
        victim = workers.children[role]
        victim.kill()
        await eventually(lambda: not Path(f"/proc/{victim.pid}").exists())
        await workers.restart(role)
        if speaker != role:
            workers.children[speaker].release()
        assert await answer == expected(PROMPT, NUM_TOKENS)
        await workers.at_rest()
        assert await workers.system.generate(PROMPT[1:]) == expected(PROMPT[1:], 8)
        await workers.at_rest()
        # One link between the two that live, and one piece of slab memory.
        for child in workers.children.values():
            assert len(set(child.memfds())) <= 1, child.memfds()


async def test_a_worker_that_is_stopped_in_any_state_and_goes_on_late() -> None:
    await all_of(VICTIMS, stop)


async def stop(children: Nursery, role: str, state: str) -> None:
    """Another worker takes over; what the stopped one has to say later counts for nothing."""
    holds, speaker = holds_for(role, state)
    async with pair(children, f"{role}-{state}", holds) as workers:
        answer = asyncio.create_task(workers.system.generate(PROMPT, max_tokens=NUM_TOKENS))
        await workers.children[speaker].held.wait()
        victim = workers.children[role]
        victim.stop()
        await eventually(lambda: is_lost(workers, victim))
        other = await children.start(role, f"other-{role}-{state}", CONFIG)
        workers.system.router.connect([WorkerAddress(Role(role), other.address)])
        if speaker != role:
            workers.children[speaker].release()
        assert await answer == expected(PROMPT, NUM_TOKENS)
        # Now it goes on, and so does the request that it held.
        victim.go_on()
        victim.release()
        await workers.at_rest()
        assert len(workers.statuses()) == 3
        for shift in range(3):
            prompt = PROMPT[shift:]
            assert await workers.system.generate(prompt) == expected(prompt, 8)
        await workers.at_rest()


def is_lost(workers: Pair, child: Child) -> bool:
    return any(w.session_address == child.address and w.state == "lost" for w in workers.statuses())


async def test_two_routers_on_the_same_workers_and_one_of_them_ends() -> None:
    """B002 and B030: equal request numbers, the same prompts; neither's end touches the other's."""
    async with (
        nursery() as children,
        pair(children, "routers", {"decode": "reserved"}, num_routers=2) as workers,
    ):
        first, second = workers.systems
        answers = [
            asyncio.create_task(system.generate(PROMPT, max_tokens=NUM_TOKENS))
            for system in (first, second)
        ]
        await workers.children["decode"].held.wait()
        answers[0].cancel()
        await first.router.close()
        workers.systems.remove(first)
        workers.children["decode"].release()
        assert await answers[1] == expected(PROMPT, NUM_TOKENS)
        await workers.at_rest()
