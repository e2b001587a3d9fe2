"""A rank of a prefill worker: what sends its KV, and the whole of a rank other than 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.core.config import Config
from kvferry.engine.backend import Backend
from kvferry.engine.follower import Follower
from kvferry.engine.loading import load_follower
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.group.rank import SenderRank
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import SendEvent
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.pool_memory import pool_memory
from kvferry.kv_transfer.prober import Probed
from kvferry.kv_transfer.push import Push
from kvferry.kv_transfer.sender import KvSender
from kvferry.kv_transfer.transport import Connect
from kvferry.kv_transfer.wire import layout_of, link_choices, link_options

MakeSender = Callable[[Callable[[SendEvent], None]], KvSender]


def sender_of(
    config: Config,
    memory: KvMemory,
    options: LinkOptions,
    clock: Callable[[], float] = time.monotonic,
    connect: Connect = connect_any,
    on_probed: Callable[[Probed], None] = lambda probed: None,
) -> MakeSender:
    """Builds one rank's sender, given who hears its events."""
    choices = link_choices(config)

    def make(on_event: Callable[[SendEvent], None]) -> KvSender:
        push = Push(config.transfer.push)
        return KvSender(memory, options, on_event, connect, clock, push, choices, on_probed)

    return make


class PrefillRank:
    """A rank other than 0. Runs the steps that rank 0 plans, and sends KV of its heads."""

    def __init__(self, config: Config, backend: Backend, secret: str, follower: Follower) -> None:
        """``backend``: this rank's part. Raises ConfigError."""
        layout = layout_of(backend.kv, backend.num_kv_heads, config.prefill.tp)
        generations = np.zeros(backend.kv.num_blocks, np.uint32)
        memory = pool_memory(backend.kv, layout, generations, follower.rank)
        make = sender_of(config, memory, link_options(config, secret, follower.incarnation))
        self._backend = backend
        self._follower = follower
        self._plane = SenderRank(make, layout.num_layers, generations, follower.event)

    @classmethod
    def join(
        cls, port: int, rank: int, folder: Path, vocab_size: int, config: Config, secret: str
    ) -> PrefillRank:
        """Come to rank 0 and load this rank's part. Raises RankLost, StartupError."""
        follower = Follower(port, rank, secret, config.cluster.start_timeout_s)
        with follower.starting():
            pool, device = config.prefill, config.cluster.device
            part = load_follower(
                follower, folder, vocab_size, config.model, pool, "prefill", device
            )
            return cls(config, part, secret, follower)

    def run(self) -> None:
        """Until the worker stops. Raises RankLost when rank 0 is gone, and what a step raised."""
        try:
            self._follower.ready(())
            self._follower.run(self._backend.runner, self._plane)
        finally:
            self._plane.close()
