"""Workers in processes of their own, without Ray: it only starts them, and carries no token."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.core.config import parse_config
from kvferry.core.errors import StartupError
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.loading import load_backend
from kvferry.models.spec import read_spec
from kvferry.prefill_worker.worker import PrefillWorker
from kvferry.router.router import WorkerAddress
from kvferry.router.workers import Role

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """Plain values from which a process builds its worker."""

    role: str
    config: dict[str, Any]
    folder: str
    secret: str
    number: int = 0
    """Among those of its role."""


@contextmanager
def worker_processes(orders: Sequence[WorkerOrder]) -> Iterator[list[WorkerAddress]]:
    """Start all, side by side; leaving ends them. Raises StartupError when one does not start."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for order in orders:
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(order, theirs), name=order.role)
            process.start()
            theirs.close()
            stack.callback(_end, process, ours)
            pipes.append(ours)
        yield [
            WorkerAddress(Role(order.role), _address(order, pipe))
            for order, pipe in zip(orders, pipes, strict=True)
        ]


def _address(order: WorkerOrder, pipe: Connection) -> str:
    try:
        if pipe.poll(START_TIMEOUT_S):
            return str(pipe.recv_bytes().decode())
    except EOFError:
        raise StartupError(f"the {order.role} worker died while starting") from None
    raise StartupError(f"the {order.role} worker did not start in {START_TIMEOUT_S:.0f} s")


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _serve(order: WorkerOrder, pipe: Connection) -> None:
    """The process: load, listen, say where, and serve until the other end of the pipe is closed."""
    asyncio.run(_serve_until_closed(order, pipe))


async def _serve_until_closed(order: WorkerOrder, pipe: Connection) -> None:
    config = parse_config(order.config)
    folder = Path(order.folder)
    prefills = order.role == Role.PREFILL
    pool = config.prefill if prefills else config.decode
    vocab_size = read_spec(folder).vocab_size
    backend = load_backend(folder, vocab_size, config.model, pool, order.role)
    kind = PrefillWorker if prefills else DecodeWorker
    worker = kind(f"{order.role}-{order.number}", config, backend, order.secret)
    try:
        pipe.send_bytes((await worker.start()).encode())
        await asyncio.to_thread(_wait_closed, pipe)
    finally:
        await worker.stop()


def _wait_closed(pipe: Connection) -> None:
    try:
        pipe.recv_bytes()
    except EOFError:
        return
