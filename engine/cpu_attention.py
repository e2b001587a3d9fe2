"""Attention over the paged cache by compiled code of the CPU, in float32.

A query's result depends on its own sequence alone, not on its neighbours, nor on how the prompt was
cut into chunks: see ``kernels/cpu/attention.h``.
"""

from __future__ import annotations

import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.step_tensors import StepTensors
from kvferry.kernels.cpu.attention import StepBatch, cache_of, is_read
from kvferry.kernels.cpu.library import CpuOps, cpu_ops
from kvferry.models.compiled_attend import CompiledAttend


def compiled_attention(kv: PagedKV, num_heads: int, dtype: torch.dtype) -> CompiledAttention | None:
    """None where torch has to do: without the library, and for what it does not compute."""
    ops = cpu_ops()
    if ops is None or dtype is not torch.float32 or not is_read(kv.layer(0)):
        return None
    return CompiledAttention(ops, kv, num_heads)


class CompiledAttention:
    """Makes the ``attend`` callback of each step."""

    def __init__(self, ops: CpuOps, kv: PagedKV, num_heads: int) -> None:
        self._ops = ops
        self._layers = [kv.layer(i) for i in range(kv.num_layers)]
        self._group = num_heads // kv.num_kv_heads
        self._caches = [cache_of(layer) for layer in self._layers]

    def __call__(self, tensors: StepTensors) -> CompiledAttend:
        """Plan one step."""
        batch = StepBatch.of(
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_tables,
            tensors.slots,
            self._layers[0],
            self._group,
            torch.get_num_threads(),
        )
        return CompiledAttend(self._ops, batch, self._caches)
