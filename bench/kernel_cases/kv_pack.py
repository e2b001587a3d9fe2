"""Packing and unpacking of slabs, in one type and across types, and copy-on-write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvferry.bench.kernel_cases.case import CACHE_TYPES, Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.kv_layer import QUANTISED_TYPES
from kvferry.kernels.kv_pack import reference
from kvferry.kernels.kv_pack.launches import copy_launch, move_launch
from kvferry.kernels.kv_pack.slab import (
    Generations,
    KvSlots,
    Range,
    SlabShape,
    Tokens,
    slab_shape,
)

BLOCK_SIZE = 16
NUM_HEADS = 8
"""KV heads of Llama-3-8B and 70B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A layer group of a sequence."""

    num_tokens: int
    num_layers: int = 8
    head_dim: int = 128
    heads: Range = (0, NUM_HEADS)
    cache: str = "bf16"
    wire: str = "bf16"

    @property
    def nbytes(self) -> int:
        """The range once in either type, with the scales."""
        rows = 2 * self.num_layers * self.num_tokens * (self.heads[1] - self.heads[0])
        head_nbytes = (
            self.head_dim * dtype.itemsize + 4 * (dtype in QUANTISED_TYPES)
            for dtype in (CACHE_TYPES[self.cache], CACHE_TYPES[self.wire])
        )
        return rows * sum(head_nbytes)


def cases() -> Iterator[Case]:
    """Eight layers of 4096 tokens; one head of eight for tensor parallelism; a short prompt."""
    for is_gather in (True, False):
        way = "gather" if is_gather else "scatter"
        yield _move(way, _Shape(num_tokens=4096), goal=0.85, in_ci=True)
        yield _move(way, _Shape(num_tokens=4096, heads=(3, 4), num_layers=32), goal=0.85)
        yield _move(way, _Shape(num_tokens=4096, cache="fp8", wire="fp8"), goal=0.85)
        yield _move(way, _Shape(num_tokens=4096, head_dim=80))
        yield _move(way, _Shape(num_tokens=128, num_layers=32))
    yield _move("gather", _Shape(num_tokens=4096, wire="fp8"), goal=0.85, in_ci=True)
    yield _move("gather", _Shape(num_tokens=4096, wire="int8"))
    yield _move("gather", _Shape(num_tokens=4096, cache="fp8"))
    yield _move("scatter", _Shape(num_tokens=4096, wire="fp8"), goal=0.85, in_ci=True)
    yield _move("scatter", _Shape(num_tokens=4096, wire="int8"))
    yield _move("scatter", _Shape(num_tokens=4096, cache="fp8"))
    for cache in ("bf16", "fp8"):
        yield _copy(64, cache)


def _move(way: str, shape: _Shape, *, goal: float | None = None, in_ci: bool = False) -> Case:
    heads = shape.heads[1] - shape.heads[0]
    return Case(
        kernel="kv_pack",
        name=(
            f"{way}, {shape.num_layers} layers x {shape.num_tokens} x {heads} heads x "
            f"{shape.head_dim}, cache {shape.cache}, wire {shape.wire}"
        ),
        make=partial(_gather if way == "gather" else _scatter, shape),
        nbytes=shape.nbytes,
        flops=0,
        # Bit for bit: both sides round once, to nearest, at the same places.
        tolerance=0.0,
        limit=Limit.COPY,
        goal=goal,
        in_ci=in_ci,
    )


def _copy(num_blocks: int, cache: str) -> Case:
    shape = _Shape(num_tokens=num_blocks * BLOCK_SIZE, num_layers=32, cache=cache, wire=cache)
    return Case(
        kernel="kv_pack",
        name=f"copy {num_blocks} blocks of 32 layers, {cache}",
        make=partial(_copy_blocks, shape),
        nbytes=shape.nbytes,
        flops=0,
        tolerance=0.0,
        limit=Limit.COPY,
        goal=0.85,
        in_ci=cache == "fp8",
    )


def _gather(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    kv, tokens, slab_of = _inputs(shape, device)
    slab, totals = _slab(slab_of, device)
    whole = (0, shape.num_layers), shape.heads

    def expected() -> list[torch.Tensor]:
        plain = torch.empty_like(slab)
        return [plain, reference.gather(kv, tokens, *whole, slab_of.dtype, plain)]

    launch = move_launch(kv, tokens, *whole, slab_of, slab, totals, True, chip)
    return Work(launches=[launch], outputs=[slab, totals], expected=expected)


def _scatter(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    kv, tokens, slab_of = _inputs(shape, device)
    slab, totals = _slab(slab_of, device)
    whole = (0, shape.num_layers), shape.heads
    if device.type != "meta":
        reference.gather(kv, tokens, *whole, slab_of.dtype, slab)
    target = KvSlots(torch.zeros_like(kv.elements), _zeros_like(kv.scales))

    def expected() -> list[torch.Tensor]:
        plain = KvSlots(target.elements.clone(), _zeros_like(target.scales))
        found = reference.scatter(plain, tokens, *whole, slab_of.dtype, slab)
        return [plain.elements.view(torch.uint8), found]

    launch = move_launch(target, tokens, *whole, slab_of, slab, totals, False, chip)
    outputs = [target.elements.view(torch.uint8), totals]
    return Work(launches=[launch], outputs=outputs, expected=expected)


def _copy_blocks(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    kv, tokens, _ = _inputs(shape, device)
    sources, targets = tokens.blocks.to(torch.int64).chunk(2)
    sources, targets = sources.contiguous(), targets.contiguous()

    def expected() -> list[torch.Tensor]:
        plain = KvSlots(kv.elements.clone(), None if kv.scales is None else kv.scales.clone())
        reference.copy_blocks(plain, BLOCK_SIZE, sources, targets)
        return [plain.elements.view(torch.uint8)]

    return Work(
        launches=[copy_launch(kv, BLOCK_SIZE, sources, targets, chip)],
        outputs=[kv.elements.view(torch.uint8)],
        expected=expected,
    )


def _inputs(shape: _Shape, device: torch.device) -> tuple[KvSlots, Tokens, SlabShape]:
    """A cache twice as large as the sequence, whose blocks lie in it in random order."""
    num_blocks = 2 * shape.num_tokens // BLOCK_SIZE
    slots = (shape.num_layers, 2, num_blocks * BLOCK_SIZE, NUM_HEADS)
    dtype = CACHE_TYPES[shape.cache]
    elements = torch.randn(*slots, shape.head_dim, device=device, dtype=torch.bfloat16)
    scales = torch.rand(slots, device=device) if dtype in QUANTISED_TYPES else None
    kv = KvSlots(elements.to(dtype), scales)
    blocks = torch.randperm(num_blocks, device=device, dtype=torch.int32)
    live = torch.zeros(num_blocks, device=device, dtype=torch.int64)
    tokens = Tokens(
        blocks=blocks,
        begin=0,
        end=shape.num_tokens,
        block_size=BLOCK_SIZE,
        generations=Generations(live, torch.zeros_like(live)),
    )
    layers = 0, shape.num_layers
    return kv, tokens, slab_shape(kv, tokens, layers, shape.heads, CACHE_TYPES[shape.wire])


def _slab(shape: SlabShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A slab, and totals that a launch adds to."""
    slab = torch.zeros(shape.nbytes, dtype=torch.uint8, device=device)
    return slab, torch.zeros(1 + shape.cut.num_tiles, dtype=torch.int64, device=device)


def _zeros_like(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)
