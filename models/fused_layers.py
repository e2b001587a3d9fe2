"""Layers that run in one call of the CPU's library instead of a dozen, put into a decoder from
outside. The results are the same, bit for bit.

    before   norm of x + residual; q, k, v
    middle   their rotation, the write of keys and values, attention
    after    o; norm of that + residual; gate, up, their unit; down

See ``fused_calls.py`` for what a call is given. Whoever wants to know when a layer's keys and
values are written is told between two calls; attention that is not the library's is called in place
of the middle.

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kvferry.kernels.cpu.library import Batch, CpuOps, Step, cpu_ops
from kvferry.models.compiled_attend import CompiledAttend
from kvferry.models.decoder import (
    Attend,
    Attention,
    Decoder,
    Heads,
    Layer,
    Linear,
    Mlp,
    Rotation,
    Telling,
)
from kvferry.models.fused_calls import Buffers, LayerCalls, calls_of, heads_of
from kvferry.models.spec import ModelSpec

LEAST_ROWS = 64
"""Buffers grow in powers of two from here."""


class Shared:
    """The buffers of a decoder, as large as its largest step so far."""

    def __init__(self, ops: CpuOps, spec: ModelSpec) -> None:
        self.ops = ops
        queries = spec.num_heads * spec.head_dim
        heads = queries + 2 * spec.num_kv_heads * spec.head_dim
        self._sizes = spec.hidden_size, queries, heads, spec.intermediate_size
        self.rows = LEAST_ROWS
        self.buffers = Buffers.of(self.rows, *self._sizes)

    def grow_to(self, rows: int) -> None:
        if rows > self.rows:
            self.rows = 1 << (rows - 1).bit_length()
            self.buffers = Buffers.of(self.rows, *self._sizes)


class FusedLayer(nn.Module):
    """A ``Layer`` with the same parameters under the same names."""

    def __init__(self, layer: Layer, shared: Shared) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self._shared = shared
        self._calls: LayerCalls | None = None
        self._num_heads = heads_of(layer.self_attn)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """As ``Layer``; what is returned is overwritten by the next layer."""
        rows, shared = x.shape[0], self._shared
        if residual is None:
            shared.grow_to(rows)
            shared.buffers.x[:rows] = x
            shared.buffers.total[:rows] = 0.0
        if self._calls is None or self._calls.buffers is not shared.buffers:
            self._calls = calls_of(self, shared.buffers)
        step, tell = (attend.attend, attend.tell) if isinstance(attend, Telling) else (attend, None)
        if isinstance(step, CompiledAttend):
            self._run_all(self._calls, step, rotation, tell)
        else:
            self._run_around(self._calls, rows, rotation, attend)
        return shared.buffers.x[:rows], shared.buffers.total[:rows]

    def _run_all(
        self,
        calls: LayerCalls,
        step: CompiledAttend,
        rotation: Rotation,
        tell: Callable[[int], None] | None,
    ) -> None:
        layer, batch = self.self_attn.layer, step.batch
        if batch.rotation is None:
            batch.rotate_by(*rotation)
        cache = ctypes.addressof(step.caches[layer])
        calls.rotation.cache = calls.attention.cache = cache
        calls.rotation.half = rotation[0].shape[1]
        if tell is None:
            self._run(calls, 0, len(calls.steps), batch.call)
            return
        self._run(calls, 0, calls.after, batch.call)
        tell(layer)
        self._run(calls, calls.after, len(calls.steps), batch.call)

    def _run_around(self, calls: LayerCalls, rows: int, rotation: Rotation, attend: Attend) -> None:
        batch, buffers = Batch(tokens=rows), calls.buffers
        self._run(calls, 0, calls.middle, batch)
        heads = self._heads(buffers.heads[:rows], rotation)
        buffers.attended[:rows] = attend(self.self_attn.layer, heads).flatten(-2)
        self._run(calls, calls.after, len(calls.steps), batch)

    def _run(self, calls: LayerCalls, first: int, end: int, batch: ctypes.Structure) -> None:
        ops = self._shared.ops
        at = ctypes.byref(calls.steps, first * ctypes.sizeof(Step))
        ops.run(at, end - first, ctypes.byref(batch), ops.lanes, torch.get_num_threads())

    def _heads(self, qkv: Tensor, rotation: Rotation) -> Heads:
        attention = self.self_attn
        all_heads = qkv.view(len(qkv), -1, attention.head_dim)
        q, k, v = all_heads.split(self._num_heads, dim=1)
        if attention.q_norm is None or attention.k_norm is None:
            return Heads(q, k, v, *rotation)
        norms = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        return Heads(q, k, v, *rotation, *norms)


def fuse_layers(decoder: Decoder) -> None:
    """Fuse all layers of a decoder, in place, where the library does everything that is in them.
    From then on it runs one step at a time.
    """
    ops, layers = cpu_ops(), decoder.model.layers
    if ops is None or not all(_can_be_fused(layer) for layer in layers):
        return
    shared = Shared(ops, decoder.spec)
    decoder.model.layers = nn.ModuleList(FusedLayer(layer, shared) for layer in layers)


def _can_be_fused(layer: nn.Module) -> bool:
    """Not where a part has been replaced, as by parallelism."""
    if not isinstance(layer, Layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not Attention or type(mlp) is not Mlp:
        return False
    linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return all(type(linear) is Linear and linear.weight.dim() == 3 for linear in linears)
