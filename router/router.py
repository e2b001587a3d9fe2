"""The router without its APIs: sessions to workers, the spine, and what there is to say about
both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from kvferry.core.config import Config
from kvferry.core.ids import new_incarnation
from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.proto import kvferry_pb2
from kvferry.proto import worker_pb2 as pb
from kvferry.router.dispatcher import Dispatcher
from kvferry.router.index import PrefixIndex
from kvferry.router.peering import Peering
from kvferry.router.policy import LongestPrefixThenLeastLoaded
from kvferry.router.session import Dial, SessionContext, WorkerSession
from kvferry.router.siblings import Siblings
from kvferry.router.spine import Spine
from kvferry.router.transfers import TransferTotals
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
            self._index,
            LongestPrefixThenLeastLoaded(),
            config.router.queue_limit,
            config.router.local_tokens,
        )
        self._spine = Spine(self._dispatcher, config.router.max_attempts)
        self._transfers = TransferTotals()
        self._peering = Peering(self._dispatcher.sessions)
        self._context = SessionContext(
            incarnation=new_incarnation(),
            dial=dial,
            index=self._index,
            accept=self._refusal,
            changed=self._changed,
            came_or_left=self._came_or_left,
            transfers=self._transfers,
            links=self._measured,
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

    async def wait_links(self, timeout_s: float) -> list[kvferry_pb2.LinkStatus]:
        """What prefill workers measured of their ways to decode workers, once all have, or as much
        as there is after ``timeout_s``.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._peering.unmeasured():
                    self._state_changed.clear()
                    await self._state_changed.wait()
        return self._peering.rows()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def generate(
        self,
        request: GenerateRequest,
        sample_index: int,
        timeline: Timeline,
        siblings: Siblings | None = None,
    ) -> AsyncGenerator[TokenStep, None]:
        return self._spine.generate(request, sample_index, timeline, siblings)

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
            links=self._peering.rows(),
            transfers=self._transfers.messages(),
        )

    def _stalled(self) -> str:
        for session in self._dispatcher.sessions:
            stalled_s = session.view.load.stalled_s
            if session.view.routable and stalled_s > STALL_S:
                return f"worker {session.view.worker_id} completed no step for {stalled_s:.0f} s"
        return ""

    def _came_or_left(self) -> None:
        self._peering.update()
        self._changed()

    def _changed(self) -> None:
        self._dispatcher.pump()
        self._state_changed.set()

    def _measured(self, view: WorkerView, links: pb.Links) -> None:
        self._peering.measured(view, links)
        self._state_changed.set()

    def _refusal(self, view: WorkerView) -> str:
        """Why a worker's hello does not fit those of the others; empty when it does.

        All must agree on the model and on layers, KV heads and head size. Block sizes and element
        types of KV are converted on the way, and so may differ.
        """
        hello = view.hello
        if hello.role != view.role:
            return f"it is a {hello.role} worker, {view.role} was expected"
        for session in self._dispatcher.sessions:
            other = session.view
            if other is view or not other.routable:
                continue
            for name, what in _AGREED.items():
                if getattr(other.hello.model, name) != getattr(hello.model, name):
                    return f"its {what} differs from that of {other.worker_id}"
            for name in _SHAPE:
                ours, theirs = getattr(other.hello.layout, name), getattr(hello.layout, name)
                if ours != theirs:
                    where = f"that of {other.worker_id}"
                    return f"its KV layout differs from {where}: {name} {theirs}, there {ours}"
        return ""


_AGREED = {
    "hash_scheme": "block hash scheme",
    "weights": "model (weights or config.json)",
    "tokenizer": "tokenizer",
    "dtype": "element type of the computation",
}
_SHAPE = ("num_layers", "num_kv_heads", "head_dim")


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
        dropped=load.dropped,
        endings=load.endings,
        link_events=load.link_events,
        preemptions=load.preemptions,
    )
