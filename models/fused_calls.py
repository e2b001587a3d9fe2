"""A layer's operations as the CPU's library takes them: structures whose addresses are put together
once, on buffers that all layers of a decoder share.

Shapes: C hidden size, I intermediate size, Hq and Hkv heads, D head_dim.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kvferry.kernels.cpu import library
from kvferry.kernels.cpu.library import Norm, Product, Step, Swiglu
from kvferry.kernels.cpu.panels import PANEL
from kvferry.models.decoder import Attention, Linear, Mlp, RMSNorm


class Kind(IntEnum):
    """As in ``types.h``."""

    PRODUCT = 0
    NORM = 1
    SWIGLU = 2
    ROTATE = 3
    ATTENTION = 4


class FusableLayer(Protocol):
    """The parts of a ``Layer``."""

    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: Mlp


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
    queries: Tensor
    """The rotated ones."""
    attended: Tensor
    projected: Tensor
    gates: Tensor
    """gate and up side by side."""
    unit: Tensor

    @classmethod
    def of(cls, rows: int, hidden: int, queries: int, heads: int, intermediate: int) -> Buffers:
        around = hidden, hidden, hidden, hidden, heads, queries, queries, hidden
        sizes = *around, 2 * intermediate, intermediate
        return cls(*(torch.empty(rows, size) for size in sizes))


@dataclass(slots=True, eq=False)
class LayerCalls:
    """A layer's operations on some buffers. The structures live as long as this."""

    buffers: Buffers
    steps: ctypes.Array[ctypes.Structure]
    middle: int
    """The number of the rotation, after which comes attention."""
    rotation: ctypes.Structure
    attention: ctypes.Structure
    kept: list[ctypes.Structure]

    @property
    def after(self) -> int:
        """The number of what comes after attention."""
        return self.middle + 2


def calls_of(layer: FusableLayer, at: Buffers) -> LayerCalls:
    """What ``layer`` computes, on ``at``."""
    attention, mlp = layer.self_attn, layer.mlp
    before = [
        _norm(layer.input_layernorm, at.x, at.total, at.between, at.normed),
        *_products([attention.q_proj, attention.k_proj, attention.v_proj], at.normed, at.heads),
    ]
    rotate, attend = _middle(attention, at)
    after = [
        (Kind.PRODUCT, _product(attention.o_proj, at.attended, at.projected)),
        _norm(layer.post_attention_layernorm, at.projected, at.between, at.total, at.normed),
        *_products([mlp.gate_proj, mlp.up_proj], at.normed, at.gates),
        (Kind.SWIGLU, _swiglu(at.gates, at.unit)),
        (Kind.PRODUCT, _product(mlp.down_proj, at.unit, at.x)),
    ]
    calls = [*before, (Kind.ROTATE, rotate), (Kind.ATTENTION, attend), *after]
    kept = [call for _, call in calls]
    return LayerCalls(at, _steps(calls), len(before), rotate, attend, kept)


def _middle(attention: Attention, at: Buffers) -> tuple[ctypes.Structure, ctypes.Structure]:
    """Rotation and attention; what of them is a step's own is filled in then."""
    num_heads = heads_of(attention)
    all_heads = at.heads.view(len(at.heads), -1, attention.head_dim)
    q, k, v = all_heads.split(num_heads, dim=1)
    rotate = library.Rotation(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        q_stride=at.heads.stride(0),
        k_stride=at.heads.stride(0),
        v_stride=at.heads.stride(0),
        out=at.queries.data_ptr(),
        q_heads=num_heads[0],
    )
    if attention.q_norm is not None and attention.k_norm is not None:
        rotate.q_norm = attention.q_norm.weight.data_ptr()
        rotate.k_norm = attention.k_norm.weight.data_ptr()
        rotate.eps = attention.q_norm.eps
    attend = library.Attention(
        q=at.queries.data_ptr(),
        out=at.attended.data_ptr(),
        group=num_heads[0] // num_heads[1],
        scale=attention.head_dim**-0.5,
    )
    return rotate, attend


def heads_of(attention: Attention) -> list[int]:
    """Of q, k and v."""
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return [project.out_features // attention.head_dim for project in projections]


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
