"""What a world is made of, drawn at random or given."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch

from kv_sim.clock import NEVER
from kv_sim.wire import Path
from kv_sim.workers import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """By default one of each, and no surprises."""

    prefill: tuple[Shape, ...] = (Shape("P0", True, 4, 12, 16, torch.float64),)
    decode: tuple[Shape, ...] = (Shape("D0", False, 4, 16, 16, torch.float64),)
    num_routers: int = 1
    growth_tokens: int = 4
    """Of the ledger."""
    slab_bytes: int = 512
    num_slabs: int = 2
    """Per link."""
    paths: tuple[Path, ...] = tuple(Path)
    """Kinds of data path that a link may have."""
    least_bytes: float = 0.0
    """Slabs wait until so much of a prompt is computed, or all is."""
    tempo: float = 1.0
    delay_s: float = 0.2
    """What a bad wire delays is late by up to this long."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.prefill + self.decode


def draw_setup(draw: Random) -> Setup:
    return Setup(
        prefill=tuple(_shape(draw, f"P{i}", True) for i in range(draw.choice((1, 1, 2)))),
        decode=tuple(_shape(draw, f"D{i}", False) for i in range(draw.choice((1, 1, 2)))),
        num_routers=draw.choice((1, 1, 2)),
        growth_tokens=draw.choice((1, 2, 4, 8)),
        slab_bytes=draw.choice((192, 512, 1024, 4096)),
        num_slabs=draw.randint(1, 4),
        least_bytes=draw.choice((0.0, 0.0, 100.0, NEVER)),
        tempo=draw.choice((1.0, 3.0, 6.0)),
        delay_s=draw.choice((0.01, 0.2, 1.0)),
    )


def _shape(draw: Random, name: str, is_prefill: bool) -> Shape:
    block_size = draw.choice((2, 3, 4, 8))
    tokens = draw.choice((40, 48, 80))
    return Shape(
        name=name,
        is_prefill=is_prefill,
        block_size=block_size,
        num_blocks=tokens // block_size,
        max_batch_tokens=draw.choice((5, 12, 40)),
        dtype=draw.choice((torch.float32, torch.float64)),
    )
