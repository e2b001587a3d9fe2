"""Moves between caches in host memory and slabs, for tests of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvferry.kernels.kv_pack.host import gather
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.slab import KvSlots


def make_move(**changes: Any) -> HostMove:
    fields: dict[str, Any] = {
        "blocks": np.arange(3, dtype=np.int32),
        "tokens": (0, 3),
        "layers": (0, 1),
        "heads": (0, 1),
        "wire": torch.float32,
        "digest": "xxh3",
        "slab_index": 5,
    }
    return HostMove(**(fields | changes))


def gathered(kv: KvSlots, block_size: int, move: HostMove) -> tuple[memoryview, list[int]]:
    """A new slab, and its digests."""
    cache = HostCache(kv, block_size)
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    return slab, gather(cache, move, slab)
