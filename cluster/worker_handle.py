"""One worker process, as the builder and the supervisor hold it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvferry.cluster.runtime import answer
from kvferry.core.config import Config
from kvferry.decode_worker.actor import DecodeActor
from kvferry.prefill_worker.actor import PrefillActor
from kvferry.router.workers import Role


class WorkerHandle:
    """An actor in its place. ``start`` may be called again after the process has died."""

    def __init__(
        self, role: Role, worker_id: str, bundle: int, group: PlacementGroup, config: Config
    ) -> None:
        self.role = role
        self.worker_id = worker_id
        self.address = ""
        self._bundle = bundle
        self._group = group
        self._config = config
        self._actor: Any = None

    async def start(self, folder: Path, vocab_size: int, secret: str) -> None:
        """Start the process and wait until it listens. Raises StartupError."""
        kind = PrefillActor if self.role is Role.PREFILL else DecodeActor
        pool = self._config.prefill if self.role is Role.PREFILL else self._config.decode
        remote = ray.remote(kind).options(
            num_cpus=pool.threads,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundle
            ),
        )
        if self._actor is not None:
            ray.kill(self._actor)  # its step loop died, its process may not have
        self._actor = remote.remote(
            self.worker_id, self._config.model_dump(), secret, get_node_ip_address
        )
        self.address = await answer(
            self._actor.start.remote(str(folder), vocab_size),
            self._config.cluster.start_timeout_s,
            f"start of {self.worker_id}",
        )

    async def ended(self) -> str:
        """Wait until the worker is no more. Returns why."""
        try:
            await self._actor.ended.remote()
        except RayError as error:
            return str(error).splitlines()[0]
        return "it was stopped"

    async def stop(self, timeout_s: float) -> None:
        """Ask it to stop, then see to it."""
        if self._actor is None:
            return
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._actor.stop.remote()
        ray.kill(self._actor)
        self._actor = None
