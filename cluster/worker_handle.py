"""One worker, a process per rank, as the builder and the supervisor hold it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kvferry.cluster.processes import Processes
from kvferry.cluster.runtime import answer
from kvferry.core.config import Config, PoolConfig
from kvferry.core.errors import StartupError
from kvferry.decode_worker.actor import DecodeActor, DecodeRankActor
from kvferry.prefill_worker.actor import PrefillActor, PrefillRankActor
from kvferry.router.workers import Role

T = TypeVar("T")

_KINDS = {
    Role.PREFILL: (PrefillActor, PrefillRankActor),
    Role.DECODE: (DecodeActor, DecodeRankActor),
    Role.BOTH: (DecodeActor, DecodeRankActor),
}
"""Of rank 0, and of the others."""


class WorkerHandle:
    """Its actors in their place. ``start`` may be called again after any of them has died."""

    def __init__(
        self, role: Role, worker_id: str, bundle: int, group: PlacementGroup, config: Config
    ) -> None:
        self.role = role
        self.worker_id = worker_id
        self.address = ""
        self._bundle = bundle
        self._group = group
        self._config = config
        self._processes = Processes()
        self._actor: Any = None
        """Rank 0."""

    async def start(self, folder: Path, vocab_size: int, secret: str) -> None:
        """Start the processes and wait until rank 0 listens. Raises StartupError."""
        self._processes.kill()  # a step loop died, its process may not have
        first, other = _KINDS[self.role]
        common = self._config.model_dump(), secret, get_node_ip_address
        self._actor = self._processes.add(self._placed(first).remote(self.worker_id, *common))
        model = str(folder), vocab_size
        following: list[Any] = []
        if self._pool.tp > 1:
            port = await self._answer(self._actor.open_group.remote())
            for rank in range(1, self._pool.tp):
                name = f"{self.worker_id} rank {rank}"
                actor = self._processes.add(self._placed(other).remote(name, rank, *common))
                following.append(actor.run.remote(port, *model))
        try:
            self.address = await self._answer(self._actor.start.remote(*model))
        except StartupError:
            await _raise_first_cause(following)
            raise

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
        self._processes.kill()

    @property
    def _pool(self) -> PoolConfig:
        return self._config.prefill if self.role is Role.PREFILL else self._config.decode

    def _placed(self, kind: type[Any]) -> Any:
        """As an actor in this worker's bundle: on the host of its other ranks."""
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=self._bundle
        )
        return ray.remote(kind).options(
            num_cpus=self._pool.threads,
            num_gpus=int(self._config.cluster.device == "cuda"),
            scheduling_strategy=strategy,
        )

    async def _answer(self, call: Awaitable[T]) -> T:
        limit_s = self._config.cluster.start_timeout_s
        return await answer(call, limit_s, f"start of {self.worker_id}")


async def _raise_first_cause(runs: list[Any]) -> None:
    """What another rank could not start for: rank 0 knows only that it is gone."""
    if not runs:
        return
    done, _ = await asyncio.to_thread(ray.wait, runs, num_returns=len(runs), timeout=1.0)
    for run in done:
        try:
            await run
        except RayTaskError as error:
            if isinstance(error.cause, StartupError):
                raise error.cause from None
        except RayError:
            continue  # its process died: rank 0 says so
