"""Tiles of flash_attention by chip, head dimension and cache, and what a tuning run tries.

Nothing here depends on the batch, so a row's result does not either.

Triton's automatic warp specialisation is not among the choices: on sm_90 it takes a function with
one loop alone (Triton 3.6; 3.7.1 fails on that one too), and this kernel needs a loop without masks
beside those with. The two warp groups of a program overlap their softmax and products unasked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention.plan import TILE_ROWS
from kvferry.kernels.kv_layer import KvLayer

WARP_GROUP_ARCHS = (90, 100)
"""Matrix operands come from shared memory there, where the tensor memory accelerator puts them;
elsewhere, sm_120 too, mma.sync takes them from registers.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How one program works."""

    keys: int
    """Keys per step of the inner loop, a power of two of at least 16."""
    buffers: int
    """Tiles of K and of V in shared memory: one is multiplied while the others arrive."""
    rows: int = TILE_ROWS
    """Query rows per program, a power of two of at least 16; the plan's tiles have as many."""
    num_warps: int = 8

    def uses_tma(self, chip: Chip, kv: KvLayer) -> bool:
        """Whether the tensor memory accelerator moves full tiles: each lies in one block, and all
        strides are multiples of 16 bytes.
        """
        aligned = all(stride * kv.k.itemsize % 16 == 0 for stride in kv.k.stride()[:3])
        return chip.arch in WARP_GROUP_ARCHS and kv.block_size % self.keys == 0 and aligned

    def num_stages(self, chip: Chip, kv: KvLayer) -> int:
        """Depth of Triton's pipeline that gives that many buffers. Where addresses come through a
        table that is loaded in the loop, entries and tiles are as many stages apart each.
        """
        return self.buffers if self.uses_tma(chip, kv) else 2 * self.buffers - 1


def config_for(chip: Chip, kv: KvLayer, dtype: torch.dtype, *, windowed: bool = False) -> Config:
    """The configuration for queries of ``dtype`` over a cache like ``kv``."""
    keys = _keys_for(chip, kv, dtype, windowed)
    options = [
        Config(keys=fewer, buffers=buffers) for fewer in (keys, keys // 2, 16) for buffers in (3, 2)
    ]
    fitting = [c for c in options if shared_nbytes(c, kv, dtype) <= chip.shared_limit]
    return (fitting or options[-1:])[0]


def shared_nbytes(config: Config, kv: KvLayer, dtype: torch.dtype) -> int:
    """Shared memory of a program, at most: queries, buffers, a converted tile of K and of V."""
    queries = config.rows * kv.head_dim * dtype.itemsize
    tile = 2 * config.keys * kv.head_dim
    converted = tile * dtype.itemsize if kv.k.dtype is not dtype else 0
    return queries + config.buffers * tile * kv.k.itemsize + converted + 1024


def _keys_for(chip: Chip, kv: KvLayer, dtype: torch.dtype, windowed: bool) -> int:
    """The longest tiles whose scores fit in registers beside the output (255 per thread). Longer
    ones rescale the output less often: half of all instructions at 64 keys and 128 columns.
    """
    converts = kv.k.dtype is not dtype
    wide = kv.head_dim > 128
    if dtype is torch.float32:
        # For small models in tests: what fits everywhere, at any head dimension.
        return 16
    if chip.arch in WARP_GROUP_ARCHS:
        has_tail = kv.head_dim & (kv.head_dim - 1) != 0
        # A second tile in width or a third loop is too many registers for 128 keys on sm_100.
        needs_room = chip.arch == 100 and (has_tail or windowed)
        return 64 if converts or wide or needs_room else 128
    if kv.head_dim <= 64:
        return 64
    by_bits = kv.k.dtype is torch.float8_e4m3fn and not chip.has_native_e4m3
    if converts:
        return 16 if wide or by_bits else 32
    return 32 if wide else 64


def candidates(chip: Chip, kv: KvLayer, dtype: torch.dtype) -> Iterator[Config]:
    """What a tuning run tries: all that fits in shared memory."""
    for keys in (32, 64, 128):
        for buffers in (2, 3, 4):
            for rows, num_warps in ((128, 8), (128, 4), (64, 4)):
                config = Config(keys=keys, buffers=buffers, rows=rows, num_warps=num_warps)
                if shared_nbytes(config, kv, dtype) <= chip.shared_limit:
                    yield config
