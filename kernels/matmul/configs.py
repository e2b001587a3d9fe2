"""Tiles of the batch-invariant product, by generation of chip.

What makes a row's result independent of the batch is that every output element is the same chain of
instructions: the same columns per instruction, the same steps over K in the same order. So BLOCK_N
and BLOCK_K are fixed per chip and type. The number of rows per tile may follow M, because a matrix
instruction computes each row of its tile from that row alone, and because all row tiles of a family
compile to one instruction shape (m64n128k16 wgmma on sm_90, m16n8k16 mma.sync on sm_80 and sm_120):
a taller tile holds more copies of it, not a larger one. On sm_100 the shape would follow the
rows (m64 or m128 tcgen05), hence a single row tile there; float32 has a single one too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.chips import Chip


@dataclass(frozen=True, slots=True)
class Rows:
    """One height of tile."""

    block_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Family:
    """Tiles that give bitwise equal rows."""

    block_n: int
    block_k: int
    rows: tuple[Rows, ...]
    """From the shortest to the tallest."""
    group_m: int = 8

    def pick(self, num_rows: int, num_columns: int, num_sms: int) -> Rows:
        """The tallest tile that is not half empty and gives every multiprocessor one."""
        num_n = -(-num_columns // self.block_n)
        best = self.rows[0]
        for rows in self.rows[1:]:
            num_tiles = -(-num_rows // rows.block_m) * num_n
            if num_rows > best.block_m and num_tiles >= num_sms:
                best = rows
        return best


HALF = {
    80: Family(128, 64, (Rows(64, 4, 4), Rows(128, 8, 3))),
    90: Family(128, 64, (Rows(64, 4, 6), Rows(128, 8, 4), Rows(256, 8, 4))),
    100: Family(128, 64, (Rows(128, 4, 5),)),
    120: Family(128, 64, (Rows(64, 4, 3), Rows(128, 8, 3))),
}
"""bfloat16 and float16, by the first architecture that a family is for."""

SINGLE = Family(64, 32, (Rows(64, 4, 2),))
"""float32, on the ordinary units of any chip: exact tests on small models, not serving."""

CANDIDATES = {
    80: (Family(128, 32, (Rows(64, 4, 5), Rows(128, 4, 4))), Family(64, 64, (Rows(64, 4, 4),))),
    90: (
        Family(256, 64, (Rows(64, 4, 4), Rows(128, 8, 3))),
        Family(64, 64, (Rows(64, 4, 8), Rows(128, 8, 5), Rows(256, 8, 4))),
        Family(128, 128, (Rows(64, 4, 3), Rows(128, 8, 3))),
    ),
    100: (Family(256, 64, (Rows(128, 4, 4),)), Family(64, 128, (Rows(128, 4, 4),))),
    120: (Family(64, 64, (Rows(64, 4, 4), Rows(128, 4, 3))),),
}
"""What a tuning run compares with HALF: whole families, since a family is what must stay fixed."""


def family_of(dtype: torch.dtype, chip: Chip) -> Family:
    """The tiles for a type on a chip."""
    if dtype is torch.float32:
        return SINGLE
    return HALF[max(arch for arch in HALF if arch <= max(chip.arch, 80))]
