"""Whole systems for benches: the workers of one configuration, and a router over them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from kvferry.bench.worker_processes import WorkerOrder, worker_processes
from kvferry.core.config import Config, parse_config
from kvferry.router.channel import GrpcDial
from kvferry.router.router import Router

READY_TIMEOUT_S = 30.0


def pd_config(threads: int) -> dict[str, Any]:
    """One prefill and one decode worker of ``threads`` each."""
    pool = {"threads": threads}
    return {"prefill": pool, "decode": pool}


def colocated_config(threads: int, workers: int = 1) -> dict[str, Any]:
    """Workers of ``threads`` each that prefill and decode."""
    pool = {"threads": threads, "workers": workers, "role": "both"}
    return {"prefill": {"workers": 0}, "decode": pool}


@asynccontextmanager
async def serving(config: dict[str, Any], folder: Path) -> AsyncIterator[Router]:
    """A router, ready, over workers in processes of their own. Raises StartupError."""
    secret = secrets.token_hex(16)
    parsed = parse_config(config)
    orders = [
        WorkerOrder(role, config, str(folder), secret, number) for role, number in _workers(parsed)
    ]
    async with AsyncExitStack() as stack:
        processes = worker_processes(orders)
        addresses = await asyncio.to_thread(processes.__enter__)
        stack.push_async_callback(asyncio.to_thread, processes.__exit__, None, None, None)
        router = Router(parsed, GrpcDial(secret, parsed.cluster.silence_s))
        stack.push_async_callback(router.close)
        router.connect(addresses)
        await router.wait_ready(READY_TIMEOUT_S)
        yield router


def _workers(config: Config) -> list[tuple[str, int]]:
    """Role and number of each."""
    counts = {"prefill": config.prefill.workers, config.decode.role: config.decode.workers}
    return [(role, number) for role, count in counts.items() for number in range(count)]
