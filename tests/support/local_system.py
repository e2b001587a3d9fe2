"""A whole system in one process: real roles, step loops, KV plane and router, and as much else
as a test asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_engine import ByteCodec
from fake_engine_model import EOS, VOCAB_SIZE
from gates import eventually

from kvferry.cache.block_pool import BlockCounts
from kvferry.cache.paged import PagedKV
from kvferry.core.config import Config, parse_config
from kvferry.core.ids import Incarnation
from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.core.sampling import SamplingParams
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.backend import Backend, ModelIdentity
from kvferry.engine.fake_runner import FakeRunner
from kvferry.engine.host import LoopThread
from kvferry.engine.outbox import Outbox
from kvferry.engine.ports import FromRouter, Gate, SessionClosed, SessionOpened
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.transport import Connect
from kvferry.prefill_worker.worker import PrefillWorker
from kvferry.proto import worker_pb2 as pb
from kvferry.router.channel import GrpcDial
from kvferry.router.intake import TextCodec
from kvferry.router.router import Router, WorkerAddress
from kvferry.router.server import ApiServer
from kvferry.router.siblings import Siblings
from kvferry.router.workers import Role

SECRET = "test-secret"

__all__ = ["EOS", "VOCAB_SIZE", "LocalSystem", "fake_backend", "local_config", "local_system"]

Worker = PrefillWorker | DecodeWorker


def fake_backend(
    block_size: int,
    num_blocks: int = 64,
    max_model_len: int = 128,
    eos: tuple[int, ...] = (),
    num_layers: int = 2,
    dtype: torch.dtype = torch.float64,
    num_host_slots: int = 0,
    **hooks: Any,
) -> Backend:
    """A model whose next token depends on every token of its context, read back from the paged
    cache, which is of ``dtype``.
    """
    kv = PagedKV.allocate(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=4,
        block_size=block_size,
        num_blocks=num_blocks,
        dtype=dtype,
        num_host_slots=num_host_slots,
    )
    identity = ModelIdentity(1, b"fake", b"", "float64")
    return Backend(FakeRunner(kv, VOCAB_SIZE, **hooks), kv, max_model_len, eos, identity)


def local_config(**sections: dict[str, Any]) -> Config:
    """Short beats, small steps, and KV that is always sent, however little of it is missing; each
    section may be added to.
    """
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": "float64"},
        "prefill": {"block_size": 4, "max_batch_tokens": 16},
        "decode": {"block_size": 4},
        "transfer": {
            "transport": "loopback",
            "probe": False,
            "staging": "1MiB",
            "slab": "256KiB",
        },
        "router": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "local_tokens": 0},
        "cluster": {"beat_s": 0.05, "silence_s": 5.0},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return parse_config(base)


class LocalStream:
    """A session without gRPC: straight into the worker's step loop and out of its outbox."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._asyncio = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outbox: Outbox | None = None
        self._hello: pb.WorkerMessage | None = None
        self._ended = False

    async def write(self, message: pb.RouterMessage) -> None:
        if message.HasField("hello"):
            incarnation = Incarnation(message.hello.incarnation)
            self._outbox = Outbox(incarnation, self._notify)
            self._hello = pb.WorkerMessage(hello=self._worker.hello)
            self._worker.loop.post(SessionOpened(self._outbox))
        elif self._outbox is not None:
            self._worker.loop.post(FromRouter(self._outbox, message))

    async def read(self) -> pb.WorkerMessage | None:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        while not self._ended:
            message = self._outbox.take() if self._outbox else None
            if message is not None:
                return message
            await self._wake.wait()
            self._wake.clear()
        return None

    async def close(self) -> None:
        self.cut()
        if self._outbox is not None:
            self._outbox.close()
            self._worker.loop.post(SessionClosed(self._outbox))

    def cut(self) -> None:
        """End the stream as if the connection broke."""
        self._ended = True
        self._wake.set()

    def beat(self) -> None:
        if self._outbox is not None:
            self._outbox.send(pb.WorkerMessage(load=self._worker.loop.load()))

    def _notify(self) -> None:
        self._asyncio.call_soon_threadsafe(self._wake.set)


class LocalDial:
    """Addresses are worker ids."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers
        self.streams: dict[str, LocalStream] = {}

    async def __call__(self, address: str) -> LocalStream:
        if address not in self.workers:
            raise ConnectionRefusedError(address)
        self.streams[address] = LocalStream(self.workers[address])
        return self.streams[address]

    async def beat(self, beat_s: float) -> None:
        while True:
            for stream in self.streams.values():
                stream.beat()
            await asyncio.sleep(beat_s)


@dataclass(slots=True)
class LocalSystem:
    """Router and workers; ``generate`` is the shortest way through them."""

    config: Config
    router: Router
    workers: dict[str, Worker]
    dial: LocalDial
    timelines: list[Timeline] = field(default_factory=list)

    async def generate(self, prompt: list[int], **sampling: Any) -> list[int]:
        """All output tokens of one prompt."""
        return [token for step in await self.steps(prompt, **sampling) for token in step.token_ids]

    async def steps(self, prompt: list[int], **sampling: Any) -> list[TokenStep]:
        async with aclosing(self.stream(prompt, **sampling)) as steps:
            return [step async for step in steps]

    @asynccontextmanager
    async def apis(self, codec: TextCodec | None = None) -> AsyncIterator[tuple[str, str]]:
        """Both APIs in front of the router; yields (gRPC address, HTTP base URL)."""
        limit = next(iter(self.workers.values())).hello.max_model_len
        server = ApiServer(self.config, self.router, codec or ByteCodec(), limit)
        grpc_address, http_address = await server.start()
        try:
            yield grpc_address, f"http://{http_address}"
        finally:
            await server.stop()

    async def choices(self, prompt: list[int], count: int, **sampling: Any) -> list[list[int]]:
        """All output tokens of ``count`` choices of one prompt."""
        siblings = Siblings(count)

        async def one(index: int) -> list[int]:
            steps = self.stream(prompt, index, siblings=siblings, **sampling)
            async with aclosing(steps):
                return [token async for step in steps for token in step.token_ids]

        return await asyncio.gather(*map(one, range(count)))

    def stream(
        self,
        prompt: list[int],
        sample_index: int = 0,
        *,
        siblings: Siblings | None = None,
        **sampling: Any,
    ) -> Any:
        """The engine's own iterator; leave it early to cancel."""
        values = {"temperature": 0.0, "seed": 0, "max_tokens": 8} | sampling
        deadline_s = values.pop("deadline_s", None)
        request = GenerateRequest(
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**values),
            deadline_s=deadline_s,
        )
        self.timelines.append(Timeline(prompt_tokens=len(prompt)))
        return self.router.generate(request, sample_index, self.timelines[-1], siblings)

    def counts(self) -> dict[str, BlockCounts]:
        return {name: w.role.sequences.pool.counts() for name, w in self.workers.items()}

    def held(self) -> int:
        """Blocks that some request still holds anywhere."""
        return sum(c.reserved + c.in_use + c.fenced for c in self.counts().values())

    async def settled(self) -> None:
        """Wait until no request holds a block, a row, a count or a place in a queue anywhere."""
        parts = [worker.role.sequences for worker in self.workers.values()]
        await eventually(
            lambda: (
                self.held() == 0
                and self.router.status().running == 0
                and not any(len(sequences) for sequences in parts)
                and all(s.table.num_free == s.table.max_rows for s in parts)
            ),
            what=f"all given back: {self.counts()}",
        )


@asynccontextmanager
async def local_system(
    config: Config,
    backend: Callable[[int], Backend] = fake_backend,
    *,
    decode_backend: Callable[[int], Backend] | None = None,
    prefill_gate: Gate | None = None,
    decode_gate: Gate | None = None,
    connect: Connect = connect_any,
    grpc: bool = False,
) -> AsyncIterator[LocalSystem]:
    """Start everything ``config`` names; ``backend(block_size)`` is asked once per worker, and
    ``decode_backend`` in its place for decode workers.
    """
    decode_backend = decode_backend or backend
    workers: dict[str, Worker] = {}
    for number in range(config.prefill.workers):
        name = f"prefill-{number}"
        workers[name] = PrefillWorker(
            name,
            config,
            backend(config.prefill.block_size),
            SECRET,
            gate=prefill_gate,
            connect=connect,
        )
    for number in range(config.decode.workers):
        name = f"{config.decode.role}-{number}"
        workers[name] = DecodeWorker(
            name, config, decode_backend(config.decode.block_size), SECRET, gate=decode_gate
        )
    run = _with_grpc if grpc else _with_threads
    async with run(config, workers) as system:
        await system.router.wait_ready(20)
        yield system


@asynccontextmanager
async def _with_threads(config: Config, workers: dict[str, Worker]) -> AsyncIterator[LocalSystem]:
    threads = [LoopThread(worker.loop, name) for name, worker in workers.items()]
    for thread in threads:
        thread.start()
    dial = LocalDial(workers)
    router = Router(config, dial)
    router.connect([WorkerAddress(Role(name.split("-")[0]), name) for name in workers])
    beats = asyncio.create_task(dial.beat(config.cluster.beat_s))
    try:
        yield LocalSystem(config, router, workers, dial)
    finally:
        beats.cancel()
        await router.close()
        for thread in threads:
            await thread.stop()
        for worker in workers.values():
            await asyncio.to_thread(worker.close_kv)


@asynccontextmanager
async def _with_grpc(config: Config, workers: dict[str, Worker]) -> AsyncIterator[LocalSystem]:
    addresses = {name: await worker.start() for name, worker in workers.items()}
    router = Router(config, GrpcDial(SECRET, config.cluster.silence_s))
    router.connect(
        [WorkerAddress(Role(name.split("-")[0]), address) for name, address in addresses.items()]
    )
    try:
        yield LocalSystem(config, router, workers, LocalDial(workers))
    finally:
        await router.close()
        for worker in workers.values():
            await worker.stop()
