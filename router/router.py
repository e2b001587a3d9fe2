"""The router without its APIs: sessions to workers, the spine, and what there is to say about
both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvferry.core.config import Config
from kvferry.core.ids import new_incarnation
from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.proto import kvferry_pb2
from kvferry.proto import worker_pb2 as pb
from kvferry.router.dispatcher import Dispatcher
from kvferry.router.index import PrefixIndex
from kvferry.router.policy import LongestPrefixThenLeastLoaded
from kvferry.router.session import Dial, SessionContext, WorkerSession
from kvferry.router.spine import Spine
from kvferry.router.workers import Role, WorkerView

STALL_S = 30.0
"""A worker that has work and completes no step for this long is not ready."""


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker listens, and what it is for."""

    role: Role
    address: str


class Router:
    """A TokenEngine over the workers of a cluster."""

    def __init__(self, config: Config, dial: Dial) -> None:
        self._config = config
        self._index = PrefixIndex()
        self._dispatcher = Dispatcher(
            self._index, LongestPrefixThenLeastLoaded(), config.router.queue_limit
        )
        self._spine = Spine(self._dispatcher, config.router.max_attempts)
        self._context = SessionContext(
            incarnation=new_incarnation(),
            dial=dial,
            index=self._index,
            accept=self._refusal,
            changed=self._changed,
            beat_s=config.cluster.beat_s,
            silence_s=config.cluster.silence_s,
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._state_changed = asyncio.Event()

    def connect(self, workers: Sequence[WorkerAddress]) -> None:
        """Keep up sessions with these workers from now on."""
        for worker in workers:
            view = WorkerView(len(self._dispatcher.sessions), worker.address, worker.role)
            session = WorkerSession(view, self._context)
            self._dispatcher.sessions.append(session)
            self._tasks[view.number] = asyncio.create_task(session.run())

    def replace(self, old_address: str, new_address: str) -> None:
        """A worker has been started again elsewhere; its session follows."""
        for session in self._dispatcher.sessions:
            view = session.view
            if view.address == old_address:
                view.address = new_address
                if not view.routable:
                    # Without waiting for the old address to answer: nobody is there.
                    self._tasks[view.number].cancel()
                    self._tasks[view.number] = asyncio.create_task(session.run())

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when requests can be served. Raises TimeoutError with the reason."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.ready()[0]:
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError:
            raise TimeoutError(self.ready()[1]) from None

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def generate(
        self, request: GenerateRequest, sample_index: int, timeline: Timeline
    ) -> AsyncGenerator[TokenStep, None]:
        return self._spine.generate(request, sample_index, timeline)

    def ready(self) -> tuple[bool, str]:
        reason = self._dispatcher.unavailable() or self._stalled()
        return not reason, reason

    def status(self) -> kvferry_pb2.StatusResponse:
        ready, reason = self.ready()
        queued = self._dispatcher.num_queued
        return kvferry_pb2.StatusResponse(
            model=self._config.model.name,
            ready=ready,
            reason=reason,
            queued=queued,
            running=self._spine.running - queued,
            workers=[_worker_status(session.view) for session in self._dispatcher.sessions],
        )

    def _stalled(self) -> str:
        for session in self._dispatcher.sessions:
            stalled_s = session.view.load.stalled_s
            if session.view.routable and stalled_s > STALL_S:
                return f"worker {session.view.worker_id} completed no step for {stalled_s:.0f} s"
        return ""

    def _changed(self) -> None:
        self._dispatcher.pump()
        self._state_changed.set()

    def _refusal(self, view: WorkerView) -> str:
        """Whether a worker's hello fits: the same model, hash scheme and KV flavour as all
        others.
        """
        hello = view.hello
        if hello.role != view.role:
            return f"it is a {hello.role} worker, {view.role} was expected"
        for session in self._dispatcher.sessions:
            other = session.view
            if other is view or not other.routable:
                continue
            if other.hello.root_hash != hello.root_hash:
                return f"its model, dtype or KV flavour differs from that of {other.worker_id}"
            if _shape(other.hello.layout) != _shape(hello.layout):
                return f"its KV layout differs from that of {other.worker_id}"
        return ""


def _shape(layout: pb.KvLayout) -> tuple[int, int, int, str]:
    """What must be equal between workers; block sizes may differ."""
    return layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype


def _worker_status(view: WorkerView) -> kvferry_pb2.WorkerStatus:
    load = view.load
    blocks = kvferry_pb2.BlockCounts(
        free=load.free,
        reserved=load.reserved,
        in_use=load.in_use,
        cached=load.cached,
        fenced=load.fenced,
    )
    return kvferry_pb2.WorkerStatus(
        worker_id=view.worker_id or f"{view.role}-{view.number}",
        role=view.role,
        state=view.state,
        blocks=blocks,
        block_size=view.hello.layout.block_size,
        running=load.running,
        waiting=load.waiting,
        steps=load.steps,
        session_address=view.address,
        reason=view.reason,
    )
