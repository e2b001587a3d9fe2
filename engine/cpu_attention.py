"""Attention over the paged cache by compiled code of the CPU, in float32.

A query's result depends on its own sequence alone, not on its neighbours, nor on how the prompt was
cut into chunks: see ``kernels/cpu/attention.h``.
"""

from __future__ import annotations

import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.step_tensors import StepTensors
from kvferry.kernels.cpu.attention import (
    SpanPlan,
    attend,
    cache_of,
    is_read,
    is_written,
    rotate_and_write,
)
from kvferry.kernels.cpu.library import CpuOps, cpu_ops
from kvferry.kernels.cpu.rows import rms_norm
from kvferry.kernels.kv_layer import KvLayer
from kvferry.kernels.rope_kv_write.reference import rope_kv_write
from kvferry.models.decoder import Attend, Heads


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

    def __call__(self, tensors: StepTensors) -> Attend:
        """Plan one step."""
        plan = SpanPlan.of(
            tensors.query_starts,
            tensors.context_lens,
            tensors.block_tables,
            self._layers[0],
            self._group,
            torch.get_num_threads(),
        )

        def attend_layer(layer: int, heads: Heads) -> torch.Tensor:
            q = self._written(heads, tensors.slots, self._layers[layer])
            return attend(self._ops, q, self._caches[layer], plan)

        return attend_layer

    def _written(self, heads: Heads, slots: torch.Tensor, kv: KvLayer) -> torch.Tensor:
        """The rotated queries, once keys and values are in their slots."""
        q, k, v = heads.q, heads.k, heads.v
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = rms_norm(q, heads.q_norm, heads.eps), rms_norm(k, heads.k_norm, heads.eps)
        if not is_written(kv):
            return rope_kv_write(q, k, v, heads.cos, heads.sin, slots, kv).contiguous()
        rotation = heads.cos.contiguous(), heads.sin.contiguous()
        return rotate_and_write(self._ops, (q, k, v), rotation, slots, kv, torch.get_num_threads())
