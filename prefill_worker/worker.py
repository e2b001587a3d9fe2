"""One prefill worker, wired: backend, accounting, role, sender, step loop, session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvferry.core.config import Config
from kvferry.core.dtypes import kv_flavour
from kvferry.core.ids import Incarnation
from kvferry.engine.backend import Backend
from kvferry.engine.host import WorkerHost
from kvferry.engine.loop import StepLoop
from kvferry.engine.ports import Gate, OpenGate
from kvferry.engine.session import SessionServer
from kvferry.engine.wiring import build_parts, session_settings, worker_hello
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.group.ranks import Ranks
from kvferry.kv_transfer.group.sender import GroupSender
from kvferry.kv_transfer.pool_memory import pool_memory
from kvferry.kv_transfer.transport import Connect
from kvferry.kv_transfer.wire import layout_message, layout_of, link_options
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.prefill_worker.rank import sender_of
from kvferry.prefill_worker.role import PrefillRole


class PrefillWorker:
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
        connect: Connect = connect_any,
    ) -> None:
        pool = config.prefill
        layout = layout_of(backend.kv, backend.num_kv_heads, backend.tp)
        root = backend.identity.root(kv_flavour(layout.dtype, layout.dtype))
        parts = build_parts(backend, pool, root, config.transfer.lease_s, clock)
        self.hello = worker_hello(worker_id, "prefill", backend, pool, root)
        self.hello.layout.CopyFrom(layout_message(layout))
        incarnation = Incarnation(self.hello.incarnation)
        live = parts.pool.generations
        self.sender = GroupSender(
            sender_of(
                config,
                pool_memory(backend.kv, layout, live),
                link_options(config, secret, incarnation),
                clock,
                connect,
                on_probed=lambda probed: self.loop.post(lambda: self.role.probed(probed)),
            ),
            Ranks(backend.tp - 1, backend.order, live),
            lambda event: self.loop.post(event),
            layout.num_layers,
        )
        batch = PrefillBatch(
            parts.sequences,
            parts.stepper,
            gate or OpenGate(),
            pool.max_batch_tokens,
            pool.max_batch_seqs,
        )
        admission = PromptAdmission(
            num_blocks=backend.kv.num_blocks,
            block_size=pool.block_size,
            max_model_len=backend.max_model_len,
            max_batch_tokens=pool.max_batch_tokens,
        )
        probe = self.sender.probe if config.transfer.probe else None
        self.role = PrefillRole(parts.sequences, admission, batch, self.sender, layout, probe)
        self.loop = StepLoop(self.role, backend.runner, clock, launcher=backend.launcher)
        self._group = backend.group
        if self._group is not None:
            self._group.on_event = lambda rank, payload: self.sender.answered(payload)
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
        self.sender.close()
        if self._group is not None:
            self._group.close()
