"""A worker's KV cache as the KV plane sees it, wherever it is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.paged import PagedKV
from kvferry.kv_transfer.device_memory import DeviceKvMemory
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.memory import KvMemory, PagedKvMemory


def pool_memory(
    kv: PagedKV, layout: KvLayout, generations: NDArray[np.uint32], rank: int = 0
) -> KvMemory:
    """``generations``: the block pool's live array. Raises ValueError when they do not fit."""
    scales = None if kv.scales is None else kv.scales.flatten(2, 3)
    kind = DeviceKvMemory if kv.tensor.is_cuda else PagedKvMemory
    return kind(kv.slots, layout, generations, rank=rank, scales=scales)
