"""Layers whose products, norms and gated units run in two calls of the CPU's library instead of a
dozen, put into a decoder from outside. The results are the same, bit for bit.

    first    norm of x + residual; q, k, v
    then     attention, which is the engine's
    second   o; norm of that + residual; gate, up, their unit; down

What a call reads and writes lies in buffers that all layers of a decoder share: its addresses are
put together once.

Shapes: T tokens, C hidden size, I intermediate size, Hq and Hkv heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor, nn

from kvferry.kernels.cpu.library import CpuOps, Norm, Product, Step, Swiglu, cpu_ops
from kvferry.kernels.cpu.panels import PANEL
from kvferry.models.decoder import (
    Attend,
    Attention,
    Decoder,
    Heads,
    Layer,
    Linear,
    Mlp,
    RMSNorm,
    Rotation,
)

LEAST_ROWS = 64
"""Buffers grow in powers of two from here."""


class Kind(IntEnum):
    """As in ``types.h``."""

    PRODUCT = 0
    NORM = 1
    SWIGLU = 2


@dataclass(slots=True, eq=False)
class Buffers:
    """Of [rows, size] each. ``x`` and ``total`` go from layer to layer."""

    x: Tensor
    """What the layer before computed."""
    total: Tensor
    """The sum before it."""
    between: Tensor
    """The sum after attention's norm."""
    normed: Tensor
    heads: Tensor
    """q, k and v side by side."""
    projected: Tensor
    gates: Tensor
    """gate and up side by side."""
    unit: Tensor

    @classmethod
    def of(cls, rows: int, hidden: int, heads: int, intermediate: int) -> Buffers:
        sizes = (hidden, hidden, hidden, hidden, heads, hidden, 2 * intermediate, intermediate)
        return cls(*(torch.empty(rows, size) for size in sizes))


class Shared:
    """The buffers of a decoder, as large as its largest step so far."""

    def __init__(self, ops: CpuOps, hidden: int, heads: int, intermediate: int) -> None:
        self.ops = ops
        self._sizes = hidden, heads, intermediate
        self.rows = LEAST_ROWS
        self.buffers = Buffers.of(self.rows, *self._sizes)

    def grow_to(self, rows: int) -> None:
        if rows > self.rows:
            self.rows = 1 << (rows - 1).bit_length()
            self.buffers = Buffers.of(self.rows, *self._sizes)


@dataclass(slots=True, eq=False)
class _Calls:
    """A layer's operations on some buffers. The structures live as long as this."""

    buffers: Buffers
    first: ctypes.Array[ctypes.Structure]
    second: ctypes.Array[ctypes.Structure]
    o_proj: ctypes.Structure
    """Of the second: its ``x`` is where attention has left its output."""
    kept: list[ctypes.Structure]


class FusedLayer(nn.Module):
    """A ``Layer`` with the same parameters under the same names."""

    def __init__(self, layer: Layer, shared: Shared) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = layer.input_layernorm, layer.self_attn
        self.post_attention_layernorm, self.mlp = layer.post_attention_layernorm, layer.mlp
        self._shared = shared
        self._calls: _Calls | None = None
        attention = layer.self_attn
        self._num_heads = [
            project.out_features // attention.head_dim
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]

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
            self._calls = self._calls_on(shared.buffers)
        calls, buffers, threads = self._calls, shared.buffers, torch.get_num_threads()
        shared.ops.run(calls.first, len(calls.first), rows, shared.ops.lanes, threads)
        attended = attend(self.self_attn.layer, self._heads(buffers.heads[:rows], rotation))
        attended = attended.contiguous()
        calls.o_proj.x = attended.data_ptr()
        shared.ops.run(calls.second, len(calls.second), rows, shared.ops.lanes, threads)
        return buffers.x[:rows], buffers.total[:rows]

    def _heads(self, qkv: Tensor, rotation: Rotation) -> Heads:
        attention = self.self_attn
        all_heads = qkv.view(len(qkv), -1, attention.head_dim)
        q, k, v = all_heads.split(self._num_heads, dim=1)
        if attention.q_norm is None or attention.k_norm is None:
            return Heads(q, k, v, *rotation)
        norms = attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps
        return Heads(q, k, v, *rotation, *norms)

    def _calls_on(self, at: Buffers) -> _Calls:
        attention, mlp = self.self_attn, self.mlp
        o_proj = _product(attention.o_proj, at.unit, at.projected)
        first = [
            _norm(self.input_layernorm, at.x, at.total, at.between, at.normed),
            *_products([attention.q_proj, attention.k_proj, attention.v_proj], at.normed, at.heads),
        ]
        second = [
            (Kind.PRODUCT, o_proj),
            _norm(self.post_attention_layernorm, at.projected, at.between, at.total, at.normed),
            *_products([mlp.gate_proj, mlp.up_proj], at.normed, at.gates),
            (Kind.SWIGLU, _swiglu(at.gates, at.unit)),
            (Kind.PRODUCT, _product(mlp.down_proj, at.unit, at.x)),
        ]
        kept = [call for _, call in (*first, *second)]
        return _Calls(at, _steps(first), _steps(second), o_proj, kept)


def fuse_layers(decoder: Decoder) -> None:
    """Fuse all layers of a decoder, in place, where the library does everything that is in them.
    From then on it runs one step at a time.
    """
    ops, layers = cpu_ops(), decoder.model.layers
    if ops is None or not all(_can_be_fused(layer) for layer in layers):
        return
    spec = decoder.spec
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shared = Shared(ops, spec.hidden_size, heads, spec.intermediate_size)
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


_Call = tuple[Kind, ctypes.Structure]


def _products(linears: list[Linear], x: Tensor, y: Tensor) -> list[_Call]:
    """Outputs side by side in ``y``; one product where the panels lie one after the other."""
    weights = [linear.weight for linear in linears]
    follow = all(
        weight.is_contiguous() and after.data_ptr() == weight.data_ptr() + weight.nbytes
        for weight, after in pairwise(weights)
    )
    if follow and all(linear.bias is None for linear in linears):
        call = _product(linears[0], x, y)
        call.panels = sum(len(weight) for weight in weights)
        return [(Kind.PRODUCT, call)]
    calls, begin = [], 0
    for linear in linears:
        calls.append((Kind.PRODUCT, _product(linear, x, y[:, begin:])))
        begin += linear.out_features
    return calls


def _product(linear: Linear, x: Tensor, y: Tensor) -> ctypes.Structure:
    weight, bias = linear.weight, linear.bias
    assert weight.shape[2] == PANEL
    return Product(
        x=x.data_ptr(),
        x_stride=weight.shape[1],
        w=weight.data_ptr(),
        panel_stride=weight.stride(0),
        bias=None if bias is None else bias.data_ptr(),
        y=y.data_ptr(),
        y_stride=y.stride(0),
        depth=weight.shape[1],
        panels=weight.shape[0],
    )


def _norm(norm: RMSNorm, x: Tensor, residual: Tensor, total: Tensor, y: Tensor) -> _Call:
    call = Norm(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        residual=residual.data_ptr(),
        residual_stride=residual.stride(0),
        weight=norm.weight.data_ptr(),
        total=total.data_ptr(),
        y=y.data_ptr(),
        size=x.shape[1],
        eps=norm.eps,
    )
    return Kind.NORM, call


def _swiglu(gates: Tensor, y: Tensor) -> ctypes.Structure:
    size = y.shape[1]
    return Swiglu(
        gate=gates.data_ptr(),
        up=gates[:, size:].data_ptr(),
        gate_stride=gates.stride(0),
        up_stride=gates.stride(0),
        y=y.data_ptr(),
        size=size,
    )


def _steps(calls: list[_Call]) -> ctypes.Array[ctypes.Structure]:
    steps: ctypes.Array[ctypes.Structure] = (Step * len(calls))(
        *(Step(kind, ctypes.addressof(call)) for kind, call in calls)
    )
    return steps
