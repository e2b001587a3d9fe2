"""A rank of a decode worker: what receives its KV, and the whole of a rank other than 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.core.config import Config
from kvferry.engine.backend import Backend
from kvferry.engine.follower import Follower
from kvferry.engine.loading import load_follower
from kvferry.kv_transfer.group.rank import ReceiverRank
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import ReceiveEvent
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.pool_memory import pool_memory
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.wire import layout_of, link_options, listeners

MakeReceiver = Callable[[Callable[[ReceiveEvent], None]], KvReceiver]


def receiver_of(
    config: Config,
    memory: KvMemory,
    options: LinkOptions,
    clock: Callable[[], float] = time.monotonic,
) -> MakeReceiver:
    """Builds one rank's receiver, given who hears its events."""
    pool = config.decode

    def make(on_event: Callable[[ReceiveEvent], None]) -> KvReceiver:
        # A worker that prefills for itself takes no KV from outside.
        ways = listeners(config, pool.host) if pool.role == "decode" else []
        return KvReceiver(memory, options, on_event, ways, clock)

    return make


class DecodeRank:
    """A rank other than 0. Takes KV for its heads, and runs the steps that rank 0 plans."""

    def __init__(self, config: Config, backend: Backend, secret: str, follower: Follower) -> None:
        """``backend``: this rank's part. Raises ConfigError, StartupError."""
        layout = layout_of(backend.kv, backend.num_kv_heads, config.decode.tp)
        generations = np.zeros(backend.kv.num_blocks, np.uint32)
        memory = pool_memory(backend.kv, layout, generations, follower.rank)
        make = receiver_of(config, memory, link_options(config, secret, follower.incarnation))
        self._backend = backend
        self._follower = follower
        self._plane = ReceiverRank(make, generations, follower.event)

    @classmethod
    def join(
        cls, port: int, rank: int, folder: Path, vocab_size: int, config: Config, secret: str
    ) -> DecodeRank:
        """Come to rank 0 and load this rank's part. Raises RankLost, StartupError."""
        follower = Follower(port, rank, secret, config.cluster.start_timeout_s)
        with follower.starting():
            pool, device = config.decode, config.cluster.device
            part = load_follower(follower, folder, vocab_size, config.model, pool, "decode", device)
            return cls(config, part, secret, follower)

    def run(self) -> None:
        """Until the worker stops. Raises RankLost when rank 0 is gone, and what a step raised."""
        try:
            self._follower.ready(self._plane.receiver.endpoints)
            self._follower.run(self._backend.runner, self._plane)
        finally:
            self._plane.close()
