"""Tiles of flash_attention by head dimension, cache and chip, and what a tuning run tries."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention.plan import TILE_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one program works."""

    keys: int
    """Keys per step of the inner loop, a power of two."""
    rows: int = TILE_ROWS
    """Query rows per program, a power of two; the plan's tiles have as many."""
    num_warps: int = 8
    num_stages: int = 2
    """Depth of Triton's software pipeline."""


def config_for(chip: Chip, head_dim: int, itemsize: int) -> Config:
    """The configuration for a cache of ``itemsize`` bytes per element."""
    return Config(keys=64)
