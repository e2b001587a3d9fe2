"""The ranks of a prefill worker as Ray actors. Ray starts, watches and stops them; no token passes
through Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.engine.loading import load_backend
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.wiring import config_on_host
from kvferry.prefill_worker.rank import PrefillRank
from kvferry.prefill_worker.worker import PrefillWorker


class PrefillActor:
    """Rank 0. Arguments are plain values, so that nothing but this class has to be known to both
    sides.
    """

    def __init__(
        self,
        worker_id: str,
        config: dict[str, Any],
        secret: str,
        node_address: Callable[[], str],
    ) -> None:
        logging.basicConfig(format=f"%(levelname)s {worker_id} %(name)s: %(message)s")
        self._worker_id = worker_id
        self._config = config_on_host(config, node_address)
        self._secret = secret
        self._group: RankGroup | None = None
        self._worker: PrefillWorker | None = None

    async def open_group(self) -> int:
        """Before ``start``, for a worker of several ranks: the port where the others come in."""
        self._group = RankGroup(self._config.prefill.tp, self._secret)
        return self._group.port

    async def start(self, folder: str, vocab_size: int) -> str:
        """Load the model and listen. Returns the session address, HOST:PORT. Raises
        StartupError.
        """
        config = self._config
        backend = await asyncio.to_thread(
            load_backend,
            Path(folder),
            vocab_size,
            config.model,
            config.prefill,
            "prefill",
            self._group,
            config.cluster.start_timeout_s,
            config.cluster.device,
        )
        self._worker = PrefillWorker(self._worker_id, config, backend, self._secret)
        return await self._worker.start()

    async def ended(self) -> None:
        """Return when stopped; raise what the step loop died of."""
        assert self._worker is not None, "not started"
        await self._worker.ended()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()


class PrefillRankActor:
    """A rank other than 0. It ends with its worker, or its worker with it."""

    def __init__(
        self,
        name: str,
        rank: int,
        config: dict[str, Any],
        secret: str,
        node_address: Callable[[], str],
    ) -> None:
        logging.basicConfig(format=f"%(levelname)s {name} %(name)s: %(message)s")
        self._rank = rank
        self._config = config_on_host(config, node_address)
        self._secret = secret

    async def run(self, port: int, folder: str, vocab_size: int) -> None:
        """Follow rank 0 until the worker stops. Raises StartupError, RankLost."""
        where = port, self._rank, Path(folder), vocab_size
        joined = await asyncio.to_thread(PrefillRank.join, *where, self._config, self._secret)
        await asyncio.to_thread(joined.run)
