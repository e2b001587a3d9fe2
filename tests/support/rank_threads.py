"""Ranks of one worker as threads of this process, in a real gloo group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from kvferry.engine.collectives import TorchCollectives, gloo_collectives

T = TypeVar("T")
TIMEOUT_S = 60.0


def on_ranks(size: int, run: Callable[[TorchCollectives], T]) -> list[T]:
    """What ``run`` returns on each rank."""
    store = dist.HashStore()

    def join_and_run(rank: int) -> T:
        ranks = gloo_collectives(store, rank, size, TIMEOUT_S)
        found = run(ranks)
        ranks.sum(torch.zeros(1))  # nobody leaves while another is still connecting
        return found

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(join_and_run, range(size)))
