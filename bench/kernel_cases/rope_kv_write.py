"""Rotation and cache write of a decode and of a prefill step, for all types of cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import CACHE_TYPES, Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.kv_layer import KvLayer, quantised
from kvferry.kernels.rope_kv_write import reference
from kvferry.kernels.rope_kv_write.wrapper import rope_kv_write_launch

EPS = 1e-6
BLOCK_SIZE = 16
# One rounding of bf16; where the order of float32 operations moves a value across it, a step of
# the cache's type: 1 of 127, or 32 of 448.
TOLERANCES = {"bf16": 2**-7, "int8": 2**-6, "fp8": 2**-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    num_tokens: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bf16"
    qk_norm: bool = False

    @property
    def nbytes(self) -> int:
        """The projection, angles and slots read, the queries and the cache written."""
        kv_heads = 2 * self.num_kv_heads
        read = 2 * self.head_dim * (self.num_heads + kv_heads + 1) + 8
        scale = 0 if self.cache == "bf16" else 4
        cached = kv_heads * (CACHE_TYPES[self.cache].itemsize * self.head_dim + scale)
        return self.num_tokens * (read + 2 * self.head_dim * self.num_heads + cached)


def cases() -> Iterator[Case]:
    """Llama-3-8B's heads, with Qwen3's norm, and Llama-3-70B's."""
    for num_tokens in (64, 8192):
        for cache in CACHE_TYPES:
            yield _case(
                f"{num_tokens} tokens, {cache}",
                _Shape(num_tokens=num_tokens, cache=cache),
                in_ci=num_tokens == 64 and cache != "int8",
            )
    yield _case("8192 tokens, bf16, QK norm", _Shape(num_tokens=8192, qk_norm=True))
    yield _case("8192 tokens, bf16, 64 heads", _Shape(num_tokens=8192, num_heads=64))
    yield _case("8192 tokens, bf16, head dim 80", _Shape(num_tokens=8192, head_dim=80))


def _case(name: str, shape: _Shape, in_ci: bool = False) -> Case:
    return Case(
        kernel="rope_kv_write",
        name=name,
        make=partial(_work, shape),
        nbytes=shape.nbytes,
        flops=3 * shape.num_tokens * (shape.num_heads + shape.num_kv_heads) * shape.head_dim,
        tolerance=TOLERANCES[shape.cache],
        limit=Limit.COPY,
        goal=0.85 if shape.num_tokens == 8192 and shape.head_dim == 128 else None,
        in_ci=in_ci,
    )


def _work(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    num_tokens, num_kv_heads, head_dim = shape.num_tokens, shape.num_kv_heads, shape.head_dim
    heads = (shape.num_heads, num_kv_heads, num_kv_heads)
    q, k, v = torch.randn(
        num_tokens, sum(heads), head_dim, device=device, dtype=torch.bfloat16
    ).split(heads, dim=1)
    angles = torch.rand(num_tokens, head_dim // 2, device=device) * 6.28
    cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
    slots = torch.randperm(num_tokens, device=device)
    weight = None
    if shape.qk_norm:
        weight = torch.randn(head_dim, device=device, dtype=torch.bfloat16)
    empty = torch.zeros(num_tokens // BLOCK_SIZE, BLOCK_SIZE, num_kv_heads, head_dim, device=device)
    (k_cache, k_scale), (v_cache, v_scale) = (
        quantised(empty, CACHE_TYPES[shape.cache]) for _ in range(2)
    )
    kv = KvLayer(k_cache, v_cache, k_scale, v_scale)
    out = torch.empty(num_tokens, shape.num_heads, head_dim, device=device, dtype=torch.bfloat16)

    def expected() -> Sequence[torch.Tensor]:
        other = KvLayer(*map(torch.clone, _tensors(kv)))
        rotated = reference.rope_kv_write(q, k, v, cos, sin, slots, other, weight, weight, EPS)
        return [rotated, *_tensors(other)]

    return Work(
        launches=[
            rope_kv_write_launch(q, k, v, cos, sin, slots, kv, weight, weight, EPS, out, chip)
        ],
        outputs=[out, *_tensors(kv)],
        expected=expected,
    )


def _tensors(kv: KvLayer) -> list[torch.Tensor]:
    every = (kv.k, kv.v, kv.k_scale, kv.v_scale)
    return [tensor for tensor in every if tensor is not None]
