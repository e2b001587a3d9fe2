"""One decode worker, wired: backend, accounting, role, receiver, step loop, session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvferry.core.config import Config
from kvferry.core.dtypes import kv_flavour
from kvferry.core.ids import Incarnation
from kvferry.decode_worker.admission import Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.decode_worker.rank import receiver_of
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.backend import Backend
from kvferry.engine.host import WorkerHost
from kvferry.engine.loop import StepLoop
from kvferry.engine.ports import Gate, OpenGate
from kvferry.engine.session import SessionServer
from kvferry.engine.wiring import build_parts, session_settings, worker_hello
from kvferry.kv_transfer.group.ranks import Ranks
from kvferry.kv_transfer.group.receiver import GroupReceiver
from kvferry.kv_transfer.pool_memory import pool_memory
from kvferry.kv_transfer.wire import (
    endpoint_messages,
    layout_message,
    layout_of,
    link_options,
)


class DecodeWorker:
    """Built with everything it needs; ``start`` opens its threads and ports, ``stop`` closes
    them.
    """

    def __init__(
        self,
        worker_id: str,
        config: Config,
        backend: Backend,
        secret: str,
        gate: Gate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = config.decode
        layout = layout_of(backend.kv, backend.num_kv_heads, backend.tp)
        wire = config.kv_wire
        root = backend.identity.root(kv_flavour(layout.dtype, wire))
        parts = build_parts(backend, pool, root, config.transfer.lease_s, clock)
        self.hello = worker_hello(worker_id, pool.role, backend, pool, root)
        self.hello.layout.CopyFrom(layout_message(layout))
        self.hello.kv_wire = wire
        incarnation = Incarnation(self.hello.incarnation)
        live = parts.pool.generations
        self.receiver = GroupReceiver(
            receiver_of(
                config,
                pool_memory(backend.kv, layout, live),
                link_options(config, secret, incarnation),
                clock,
            ),
            Ranks(backend.tp - 1, backend.order, live),
            lambda event: self.loop.post(event),
            backend.rank_endpoints,
        )
        self.hello.kv_endpoints.extend(endpoint_messages(self.receiver.endpoints))
        gate = gate or OpenGate()
        batch = DecodeBatch(
            parts.sequences, parts.stepper, gate, pool.max_batch_tokens, pool.max_batch_seqs
        )
        ledger = Ledger(
            num_blocks=backend.kv.num_blocks,
            block_size=pool.block_size,
            max_model_len=backend.max_model_len,
            growth_tokens=pool.growth_tokens,
        )
        self.role = DecodeRole(
            parts.sequences,
            ledger,
            batch,
            self.receiver,
            gate,
            pool.reserve_queue,
            wire,
            backend.kv.num_host_slots,
        )
        self.loop = StepLoop(self.role, backend.runner, clock, launcher=backend.launcher)
        self._group = backend.group
        if self._group is not None:
            self._group.on_event = self.receiver.answered
            self._group.on_lost = self.loop.break_down
        server = SessionServer(self.loop, self.hello, session_settings(config, pool, secret))
        self.host = WorkerHost(self.loop, server, worker_id)

    async def start(self) -> str:
        """Returns the session address, HOST:PORT. Raises StartupError."""
        return await self.host.start()

    async def ended(self) -> None:
        """Return when stopped; raise what the step loop died of."""
        await self.host.ended()

    async def stop(self) -> None:
        await self.host.stop()
        await asyncio.to_thread(self.close_kv)

    def close_kv(self) -> None:
        """End all transfers and links, and the other ranks."""
        self.receiver.close()
        if self._group is not None:
            self._group.close()
