"""Tiles of the quantised products and their splits along K, by chip and size of batch.

What the choice depends on is the bucket of M, N, K and the chip: two batches of one bucket are
computed in the same order, row by row. ``FIXED`` is the one tile for every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.kernels.chips import Chip
from kvferry.kernels.quant_matmul.layout import UNIT


@dataclass(frozen=True, slots=True)
class Tile:
    """Work of one program for batches up to ``max_m`` rows."""

    max_m: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 2
    """Programs to have at least, by splitting K, so that enough loads are in flight."""


@dataclass(frozen=True, slots=True)
class Split:
    """How K is cut: runs of ``units_per_split`` units, the last one maybe shorter."""

    num_splits: int
    units_per_split: int


ANY = 1 << 30
MIN_UNITS = 4
"""A split of fewer units spends its time filling the pipeline."""

TILES = {
    80: (
        Tile(8, 8, 128, 4, 4, 3),
        Tile(16, 16, 128, 4, 4, 3),
        Tile(32, 32, 128, 4, 4),
        Tile(64, 64, 128, 8, 3),
        Tile(256, 64, 128, 8, 3),
        Tile(ANY, 128, 128, 8, 3, 1),
    ),
    90: (
        Tile(8, 8, 128, 4, 4, 3),
        Tile(16, 16, 64, 2, 4, 6),
        Tile(32, 32, 128, 4, 4, 3),
        Tile(64, 64, 128, 8, 4),
        Tile(256, 64, 128, 8, 4),
        Tile(ANY, 128, 128, 8, 3, 1),
    ),
    100: (
        Tile(8, 8, 128, 4, 4, 3),
        Tile(16, 16, 64, 2, 4, 6),
        Tile(32, 32, 64, 2, 4, 6),
        Tile(ANY, 32, 64, 2, 4, 1),
    ),
}
"""By architecture; the first tile that holds M is taken.

Up to 16 rows it is mma.sync on every chip (8 columns or 2 warps leave no other), which takes
weights from registers without waiting for an asynchronous product of each group. On sm_100 that
holds for all sizes: tcgen05 would have the unpacked weights go through tensor memory.
"""

FIXED = {
    80: Tile(ANY, 64, 64, 4, 3, 3),
    90: Tile(ANY, 64, 64, 4, 4, 3),
    100: Tile(ANY, 32, 64, 2, 4, 3),
}
"""For ``batch_invariant``: split as for one row of tiles, whatever M. 64 columns leave registers
for a third accumulator, the sum of the splits."""

CANDIDATES = tuple(
    Tile(16, block_m, block_n, num_warps, num_stages, programs_per_sm)
    for block_m in (8, 16)
    for block_n, num_warps in ((64, 2), (64, 4), (128, 2), (128, 4), (256, 4), (256, 8))
    for num_stages in (3, 4, 5)
    for programs_per_sm in (1, 2, 4)
)
"""What a tuning run compares for batches of up to 16 rows."""


def tile_for(m: int, chip: Chip, batch_invariant: bool) -> Tile:
    """The tile for ``m`` rows."""
    # sm_120 has the matrix instructions of sm_80.
    generation = 80 if chip.arch >= 120 else max(each for each in TILES if each <= chip.arch)
    if batch_invariant:
        return FIXED[generation]
    return next(tile for tile in TILES[generation] if m <= tile.max_m)


def split_for(tile: Tile, n: int, k: int, chip: Chip) -> Split:
    """The split along K for a tile; independent of M but for the tile's bucket."""
    units = -(-k // UNIT)
    rows_of_tiles = 1 if tile.max_m == ANY else -(-tile.max_m // tile.block_m)
    num_programs = rows_of_tiles * -(-n // tile.block_n)
    wanted = -(-chip.num_sms * tile.programs_per_sm // num_programs)
    units_per_split = min(units, max(MIN_UNITS, units // wanted))
    return Split(-(-units // units_per_split), units_per_split)
