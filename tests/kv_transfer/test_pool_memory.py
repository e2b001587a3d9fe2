"""The memory of a worker's own cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.cache.paged import PagedKV
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.memory import Form, PagedKvMemory
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.pool_memory import pool_memory
from kvferry.kv_transfer.wire import layout_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_cache_in_host_memory_is_packed_with_its_scales(dtype: torch.dtype) -> None:
    kv = PagedKV.allocate(
        num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, num_blocks=4, dtype=dtype
    )
    kv.tensor.fill_(3)
    if kv.scales is not None:
        kv.scales.fill_(0.5)
    generations = np.ones(4, np.uint32)
    memory = pool_memory(kv, layout_of(kv), generations)
    assert isinstance(memory, PagedKvMemory)
    blocks = BlockTable(
        block_ids=np.array([2, 0], np.int32), generations=np.array([1, 1], np.uint32)
    )
    layout = memory.layout
    nbytes = 5 * layout.token_bytes
    slab = memoryview(bytearray(nbytes))
    move = SlabMove(0, Span(0, 2), Span(0, 2), Span(1, 6), nbytes)
    memory.pack(blocks, move, Form(layout.dtype, "xxh3"), slab)
    count = 2 * 2 * 5 * 2
    assert (torch.frombuffer(slab, dtype=dtype)[: count * 8] == 3).all()
    if kv.scales is not None:
        assert (torch.frombuffer(slab, dtype=torch.float32)[-count:] == 0.5).all()
