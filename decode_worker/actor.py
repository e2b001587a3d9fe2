"""The decode worker as a Ray actor. Ray starts, watches and stops it; no token passes through
Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.loading import load_backend
from kvferry.engine.wiring import config_on_host


class DecodeActor:
    """Arguments are plain values, so that nothing but this class has to be known to both sides."""

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
        self._worker: DecodeWorker | None = None

    async def start(self, folder: str, vocab_size: int) -> str:
        """Load the model and listen. Returns the session address, HOST:PORT. Raises
        StartupError.
        """
        config = self._config
        backend = await asyncio.to_thread(
            load_backend, Path(folder), vocab_size, config.model, config.decode, "decode"
        )
        self._worker = DecodeWorker(self._worker_id, config, backend, self._secret)
        return await self._worker.start()

    async def ended(self) -> None:
        """Return when stopped; raise what the step loop died of."""
        assert self._worker is not None, "not started"
        await self._worker.ended()

    async def stop(self) -> None:
        if self._worker is not None:
            await self._worker.stop()
