"""Tiles of flash_decoding by chip, element size and head dimension, and what a tuning run tries.

The kernel waits for memory, so a configuration is chosen by bytes in flight. Little's law asks an
SM of an H200 for bandwidth x latency = 36 GB/s x 1 to 1.5 us = 36 to 54 KB. A program has all but
one or two of its stages under way, K and V in each: 64 to 96 KB at 16 KB per tile and 4 stages, and
an SM has two programs, so that one computes while the other's copies arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import next_power_of_2

KIB = 1024
LARGE_SHARED = 200 * KIB
"""Shared memory of a data-centre chip from Hopper on; older and smaller ones get smaller tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one launch cuts its work."""

    tile: int
    """Tokens of K and of V that are multiplied at a time, a power of two of at least 16."""
    num_stages: int = 4
    """Depth of Triton's software pipeline: one less tiles are in shared memory."""
    num_warps: int = 4
    programs_per_sm: int = 2
    """Programs that share an SM; the grid is as many as the chip holds at once."""

    def __str__(self) -> str:
        return (
            f"{self.tile} keys, {self.num_stages} stages, {self.num_warps} warps, "
            f"{self.programs_per_sm} per SM"
        )

    def shared_nbytes(self, itemsize: int, head_dim: int) -> int:
        """About what an SM must have for its programs: the tiles under way, and V in 16 bits."""
        row = next_power_of_2(head_dim)
        tiles = 2 * (self.num_stages - 1) * itemsize + (2 if itemsize == 1 else 0)
        return self.programs_per_sm * self.tile * row * tiles


def max_rows(itemsize: int) -> int:
    """Rows of queries that one tile can have: what conversion leaves of the registers."""
    return 32 if itemsize == 1 else 64


def config_for(chip: Chip, itemsize: int, head_dim: int, rows: int) -> Config:
    """For a cache of ``itemsize`` bytes per element and ``rows`` rows of queries per tile."""
    row = next_power_of_2(head_dim) * itemsize
    if chip.shared_limit < LARGE_SHARED:
        fits_twice = itemsize > 1 or chip.shared_limit > 128 * KIB
        return Config(
            tile=_tile(8 * KIB, row, 64),
            num_stages=3,
            num_warps=4 if rows < 64 else 8,
            programs_per_sm=2 if fits_twice and rows < 64 else 1,
        )
    if rows < 64 and itemsize > 1:
        return Config(tile=_tile(16 * KIB, row, 128 if rows == 16 else 64))
    if rows < 64:
        # Such tiles cost instructions, of which twice as many tokens share some, and room for
        # their values in 16 bits.
        nbytes, most = (16 * KIB, 128) if rows == 16 else (8 * KIB, 64)
        return Config(tile=_tile(nbytes, row, most), num_stages=3)
    # The sums of so many rows fill the registers of four warps.
    if itemsize == 2 and head_dim <= 128:
        return Config(tile=_tile(8 * KIB, row, 64))
    return Config(tile=_tile(8 * KIB, row, 64), num_warps=8, programs_per_sm=1)


def _tile(nbytes: int, row_nbytes: int, most: int) -> int:
    return min(most, max(16, nbytes // row_nbytes))


def candidates(itemsize: int, head_dim: int) -> Iterator[Config]:
    """What a tuning run tries: more or fewer bytes per tile, stages and programs."""
    row = next_power_of_2(head_dim) * itemsize
    for nbytes in (8 * KIB, 16 * KIB, 32 * KIB):
        for num_stages in (2, 3, 4, 5):
            for num_warps, programs_per_sm in ((2, 4), (4, 2), (4, 3), (4, 4), (8, 1)):
                yield Config(
                    tile=min(256, max(16, nbytes // row)),
                    num_stages=num_stages,
                    num_warps=num_warps,
                    programs_per_sm=programs_per_sm,
                )
