"""Cached prefixes: fully cached prompts, hashes in other processes, other block sizes, misfits
(B004, B011, B012).
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gates import eventually
from local_system import SECRET, LocalDial, fake_backend, local_config, local_system
from tiny_system import TinyModel, make_tiny, sampling_params

from kvferry.cache.hashing import chain_hashes
from kvferry.core.config import Config
from kvferry.core.errors import Unavailable
from kvferry.core.ids import BlockHash, new_incarnation
from kvferry.core.request import GenerateRequest, Timeline
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.backend import Backend
from kvferry.engine.host import LoopThread
from kvferry.prefill_worker.worker import PrefillWorker
from kvferry.router.channel import GrpcDial
from kvferry.router.index import PrefixIndex
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.session import SessionContext, WorkerSession
from kvferry.router.transfers import TransferTotals
from kvferry.router.workers import Role, WorkerState, WorkerView

pytestmark = pytest.mark.slow

POOLS: dict[str, dict[str, dict[str, Any]]] = {
    "PD": {"prefill": {"block_size": 4}, "decode": {"block_size": 4}},
    "PD, blocks 4 and 8": {"prefill": {"block_size": 4}, "decode": {"block_size": 8}},
    "PD, blocks 8 and 4": {"prefill": {"block_size": 8}, "decode": {"block_size": 4}},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both", "block_size": 4}},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3")


@pytest.mark.parametrize("max_tokens", [1, 5])
@pytest.mark.parametrize("pools", POOLS)
async def test_a_fully_cached_prompt_gives_the_same_answer_again(
    pools: str, max_tokens: int, tiny: TinyModel
) -> None:
    """B011: something is always left to compute, whatever is cached."""
    async with local_system(local_config(**POOLS[pools]), tiny.backends()) as system:
        for length in (1, 4, 5, 7, 8, 9, 16, 17, 24, 25):
            prompt = [length, *range(30, 29 + length)]
            expected = tiny.answer(prompt, max_tokens=max_tokens, logprobs=5)
            for repetition in range(3):
                steps = await system.steps(prompt, max_tokens=max_tokens, logprobs=5)
                assert [t for step in steps for t in step.token_ids] == expected.token_ids
                found = [entry for step in steps for entry in step.logprobs]
                for ours, theirs in zip(found, expected.logprobs, strict=True):
                    assert ours.token_id == theirs.token_id
                    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
                    assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-5)
                timeline = system.timelines[-1]
                assert timeline.cached_tokens_prefill < len(prompt)
                if repetition:
                    size = 8 if pools == "PD, blocks 8 and 4" else 4
                    assert timeline.cached_tokens_prefill == (length - 1) // size * size
                # P's part may end a moment after the answer.
                await system.settled()


class WorkerProcess:
    """A worker in a process of its own, with its own seed of Python's ``hash``."""

    def __init__(self, role: str, folder: Path, block_size: int, hash_seed: int) -> None:
        script = Path(__file__).parents[1] / "support" / "worker_process.py"
        self.role = role
        self._process = subprocess.Popen(
            [sys.executable, str(script), role, str(folder), str(block_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )

    async def line(self) -> str:
        assert self._process.stdout is not None
        return (await asyncio.to_thread(self._process.stdout.readline)).strip()

    async def close(self) -> None:
        """Let it stop in order. Raises AssertionError when it did not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            assert await asyncio.to_thread(self._process.wait, 20) == 0
        finally:
            self._process.kill()
            self._process.stdout.close()


@dataclasses.dataclass(slots=True)
class Watcher:
    """A second router that sends nothing: its index of what workers hold."""

    index: PrefixIndex
    views: list[WorkerView]

    def overlap(self, number: int, tokens: list[int]) -> int:
        """Leading blocks of ``tokens`` that the worker holds."""
        hello = self.views[number].hello
        root = BlockHash(hello.root_hash)
        chain = chain_hashes(root, tokens, hello.layout.block_size)
        return self.index.matched_blocks(chain, [number])[number]


@asynccontextmanager
async def watching(addresses: list[WorkerAddress]) -> AsyncIterator[Watcher]:
    index = PrefixIndex()
    context = SessionContext(
        incarnation=new_incarnation(),
        dial=GrpcDial(SECRET, 5.0),
        index=index,
        accept=lambda view: "",
        changed=lambda: None,
        came_or_left=lambda: None,
        transfers=TransferTotals(),
        links=lambda view, links: None,
        beat_s=0.05,
        silence_s=5.0,
    )
    views = [WorkerView(i, a.address, a.role) for i, a in enumerate(addresses)]
    tasks = [asyncio.create_task(WorkerSession(view, context).run()) for view in views]
    try:
        yield Watcher(index, views)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def generate(
    router: Router, prompt: list[int], **sampling: Any
) -> tuple[list[int], Timeline]:
    timeline = Timeline(prompt_tokens=len(prompt))
    request = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampling_params(**sampling))
    steps = [step async for step in router.generate(request, 0, timeline)]
    return [token for step in steps for token in step.token_ids], timeline


@pytest.mark.timeout(120)
async def test_hashes_agree_between_processes_and_block_sizes_are_converted(
    tiny: TinyModel,
) -> None:
    """B012 and B004, over real sessions and shared memory: three processes, three hash seeds."""
    workers = [
        WorkerProcess("prefill", tiny.folder, 4, hash_seed=11),
        WorkerProcess("decode", tiny.folder, 8, hash_seed=12),
    ]
    config = local_config(transfer={"transport": "auto"})
    router = Router(config, GrpcDial(SECRET, config.cluster.silence_s))
    try:
        lines = [(await worker.line()).split() for worker in workers]
        seeds = {hash("kvferry"), *(int(line[0]) for line in lines)}
        assert len(seeds) == 3, "the processes hash strings alike: this test means nothing"
        addresses = [
            WorkerAddress(Role(worker.role), line[1])
            for worker, line in zip(workers, lines, strict=True)
        ]
        router.connect(addresses)
        await router.wait_ready(20)
        await overlap_is_found(router, addresses, tiny)
    finally:
        await router.close()
        for worker in workers:
            await worker.close()


async def overlap_is_found(router: Router, addresses: list[WorkerAddress], tiny: TinyModel) -> None:
    prompt = list(range(10, 39))  # 29 tokens: seven blocks of 4 and a tail, three of 8 and a tail
    async with watching(addresses) as watcher:
        tokens, timeline = await generate(router, prompt, max_tokens=6)
        assert tokens == tiny.answer(prompt, tokens, max_tokens=6).token_ids
        assert timeline.transfer_bytes > 0
        known = prompt + tokens
        await eventually(lambda: watcher.overlap(0, known) == 7 and watcher.overlap(1, known) == 4)
        assert watcher.overlap(0, [9, *known]) == 0

        follow_up = [*known, 3, 4, 5]
        tokens, timeline = await generate(router, follow_up, max_tokens=6)
        assert tokens == tiny.answer(follow_up, tokens, max_tokens=6).token_ids
        assert timeline.cached_tokens_prefill == 28
        assert timeline.cached_tokens_decode == 32
    # Whoever connects later learns the same from the snapshot.
    async with watching(addresses) as watcher:
        await eventually(
            lambda: (
                all(view.state is WorkerState.READY for view in watcher.views)
                and watcher.overlap(0, follow_up) == 9
                and watcher.overlap(1, follow_up) == 4
            )
        )


def misfits(tiny: TinyModel, other: TinyModel) -> dict[str, tuple[Backend, str]]:
    """What must not join a prefill worker of the tiny model in float64, and the reason."""
    good = tiny.backends()(4)
    return {
        "another model": (other.backends()(4), "its model (weights or config.json) differs"),
        "another tokenizer": (identified(good, good, tokenizer=b"?"), "its tokenizer differs"),
        "another dtype": (
            tiny.backends(dtype="float32")(4),
            "its element type of the computation differs",
        ),
        "another scheme": (identified(good, good, hash_scheme=9), "its block hash scheme differs"),
        "another layout": (
            identified(fake_backend(4), good),
            "its KV layout differs",
        ),
    }


def identified(backend: Backend, like: Backend, **changes: Any) -> Backend:
    """A backend that says to be of the same model as another one, but for ``changes``."""
    return dataclasses.replace(backend, identity=dataclasses.replace(like.identity, **changes))


@pytest.mark.parametrize(
    "kind",
    ["another model", "another tokenizer", "another dtype", "another scheme", "another layout"],
)
async def test_a_worker_that_does_not_fit_is_refused_with_the_reason(
    kind: str, tiny: TinyModel, tmp_path: Path
) -> None:
    misfit, reason = misfits(tiny, make_tiny(tmp_path, "qwen3", seed=1))[kind]
    config = local_config()
    async with unready(config, tiny.backends()(4), misfit) as router:
        await eventually(lambda: "refused" in states_of(router).values())
        with pytest.raises(TimeoutError) as refused:
            await router.wait_ready(0.01)
        status = router.status()
        assert not status.ready
        states = states_of(router)
        assert sorted(states.values()) == ["ready", "refused"]
        # Whoever said hello second is the one refused.
        first, second = sorted(states, key=states.__getitem__)
        expected = f"no {second} worker: {second}-0 {reason} from that of {first}-0"
        assert str(refused.value) == status.reason
        assert status.reason.startswith(expected)
        with pytest.raises(Unavailable, match="differs"):
            await generate(router, [5, 6, 7])


def states_of(router: Router) -> dict[str, str]:
    return {worker.role: worker.state for worker in router.status().workers}


@asynccontextmanager
async def unready(config: Config, prefill: Backend, decode: Backend) -> AsyncIterator[Router]:
    """One worker of each kind and a router that was told to connect, and no more."""
    workers = {
        "prefill-0": PrefillWorker("prefill-0", config, prefill, SECRET),
        "decode-0": DecodeWorker("decode-0", config, decode, SECRET),
    }
    threads = [LoopThread(worker.loop, name) for name, worker in workers.items()]
    for thread in threads:
        thread.start()
    router = Router(config, LocalDial(workers))
    router.connect([WorkerAddress(Role(name.split("-")[0]), name) for name in workers])
    try:
        yield router
    finally:
        await router.close()
        for thread in threads:
            await thread.stop()
        for worker in workers.values():
            worker.close_kv()
