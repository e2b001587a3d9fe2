"""Tiles of flash_decoding by chip, element size and head dimension, and what a tuning run tries.

The kernel waits for memory, so a configuration is chosen by bytes in flight: Little's law asks for
bandwidth x latency / SMs, on an H200 4.8 TB/s x 1 us / 132 = 36 KB per SM. Two programs per SM with
all but one of their stages under way exceed that everywhere in the table below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one launch cuts its work."""

    tile: int
    """Tokens of K and of V that are multiplied at a time, a power of two of at least 16."""
    num_stages: int = 3
    """Depth of Triton's software pipeline."""
    num_warps: int = 4
    programs_per_sm: int = 2
    """Programs that share an SM; the grid is as many as the chip holds at once."""


TILE_NBYTES = 16 * 1024
"""Of K in one tile, padding included."""


def config_for(chip: Chip, itemsize: int, head_dim: int) -> Config:
    """The configuration for a cache of ``itemsize`` bytes per element."""
    row = next_power_of_2(head_dim) * itemsize
    tile = min(128, max(16, TILE_NBYTES // row))
    return Config(tile=tile)


def candidates(itemsize: int, head_dim: int) -> Iterator[Config]:
    """What a tuning run tries: more or fewer bytes per tile, stages and programs."""
    row = next_power_of_2(head_dim) * itemsize
    for nbytes in (8 * 1024, 16 * 1024, 32 * 1024):
        for num_stages in (2, 3, 4, 5):
            for num_warps, programs_per_sm in ((2, 4), (4, 2), (4, 3), (4, 4), (8, 1)):
                yield Config(
                    tile=min(256, max(16, nbytes // row)),
                    num_stages=num_stages,
                    num_warps=num_warps,
                    programs_per_sm=programs_per_sm,
                )
