"""Ray, started and stopped for one system. Every wait has a limit."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from kvferry.core.config import ON_ONE_HOST, Config
from kvferry.core.errors import KvferryError, StartupError

T = TypeVar("T")

log = logging.getLogger(__name__)

START_TRIES = 4
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least: KV and tokens never go through its object store."""
NAMESPACE = "kvferry"
ROLE_SHARE = 0.001
"""Of the one unit of its role that a host offers: that is a mark and limits nothing."""
_NOTHING: Mapping[str, float] = {}


@asynccontextmanager
async def ray_runtime(config: Config) -> AsyncIterator[PlacementGroup]:
    """Ray with room for all workers. Raises StartupError.

    Workers are placed on few hosts, on one where KV can only move within it, and on hosts of their
    role where the cluster says which those are.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-") as clean:
        await asyncio.to_thread(start_ray, config, clean)
        try:
            wanted = bundles(config, ray.cluster_resources())
            group = placement_group(wanted, strategy=strategy(config))
            await _placed(group, wanted, config.cluster.start_timeout_s)
            try:
                yield group
            finally:
                remove_placement_group(group)
        finally:
            await asyncio.to_thread(ray.shutdown)


def bundles(config: Config, cluster: Mapping[str, float] = _NOTHING) -> list[dict[str, float]]:
    """Resources of each worker, prefill workers first. ``cluster``: what there is in all; hosts
    that offer the resource ``prefill`` or ``decode`` are for workers of that pool.
    """
    wanted = []
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        own = {role: ROLE_SHARE} if role in cluster else {}
        # One bundle per worker: its ranks share a host.
        bundle = {"CPU": float(pool.threads * pool.tp), **own}
        if config.cluster.device == "cuda":
            bundle["GPU"] = float(pool.tp)
        wanted += [dict(bundle) for _ in range(pool.workers)]
    return wanted


def strategy(config: Config) -> str:
    """How Ray places the workers."""
    return "STRICT_PACK" if config.transfer.transport in ON_ONE_HOST else "PACK"


async def answer(call: Awaitable[T], timeout_s: float, what: str) -> T:
    """The result of a remote call. Raises StartupError when it fails or takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError:
        raise StartupError(f"{what} took longer than {timeout_s:.0f} s") from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, KvferryError):
            raise cause from None
        raise StartupError(f"{what} failed: {cause}") from error
    except RayActorError as error:
        raise StartupError(f"{what} failed: the worker process died: {error}") from None


def start_ray(config: Config, clean: str, init: Callable[..., object] = ray.init) -> None:
    """Start or join Ray, with ``clean`` as its actors' folder. Raises StartupError."""
    # A serving system does not report its use anywhere unless its operator says so.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.cluster.ray_address
    own = {}
    if address == "local":
        cpus = sum(bundle["CPU"] for bundle in bundles(config))
        own = {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
        own["include_dashboard"] = False
    for left in reversed(range(START_TRIES)):
        try:
            # Without a working_dir of their own, actors would import from the driver's folder.
            init(
                address=address,
                namespace=NAMESPACE,
                runtime_env={"working_dir": clean},
                logging_level="error",
                **own,
            )
            return
        except Exception as error:
            ray.shutdown()
            reason = " ".join(str(error).split())
            # Ray waits 30 s for its processes, too little where their programs come from a slow
            # disk for the first time, and says so in a plain Exception or RuntimeError.
            if not left or "timed out" not in reason.lower():
                message = f"cluster.ray_address {address}: Ray does not start: {reason}"
                raise StartupError(message) from None
            log.warning("Ray was not up in time; trying again")


async def _placed(group: PlacementGroup, wanted: list[dict[str, float]], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await group.ready()
    except TimeoutError:
        raise StartupError(
            f"there is no room for all workers ({wanted}): "
            "lower prefill.workers, decode.workers or their threads, or add a larger node"
        ) from None
