"""Tiles of flash_attention by chip, head dimension and cache, and what a tuning run tries.

Nothing here depends on the batch, so a row's result does not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention.plan import TILE_ROWS
from kvferry.kernels.kv_layer import KvLayer


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
        return chip.arch >= 90 and kv.block_size % self.keys == 0 and aligned

    def num_stages(self, chip: Chip, kv: KvLayer) -> int:
        """Depth of Triton's pipeline that gives that many buffers. Where addresses come through a
        table that is loaded in the loop, entries and tiles are as many stages apart each.
        """
        return self.buffers if self.uses_tma(chip, kv) else 2 * self.buffers - 1


def config_for(chip: Chip, kv: KvLayer, dtype: torch.dtype) -> Config:
    """The configuration for queries of ``dtype`` over a cache like ``kv``."""
    keys = _keys_for(chip, kv, dtype)
    for buffers in (3, 2):
        config = Config(keys=keys, buffers=buffers)
        if shared_nbytes(config, kv, dtype) <= chip.shared_limit:
            break
    return config


def shared_nbytes(config: Config, kv: KvLayer, dtype: torch.dtype) -> int:
    """Shared memory of a program, about: queries, buffers, a converted tile of K and of V."""
    queries = config.rows * kv.head_dim * dtype.itemsize
    tile = 2 * config.keys * kv.head_dim
    converted = tile * dtype.itemsize if kv.k.dtype is not dtype else 0
    return queries + config.buffers * tile * kv.k.itemsize + converted + 1024


def _keys_for(chip: Chip, kv: KvLayer, dtype: torch.dtype) -> int:
    """The longest tiles whose scores fit in registers beside the output (255 per thread). Longer
    ones rescale the output less often: half of all instructions at 64 keys and 128 columns.
    """
    converts = kv.k.dtype is not dtype
    if dtype is torch.float32:
        return 16
    if chip.arch in (90, 100):
        # Operands come from shared memory (and on sm_100 results go to tensor memory).
        return 64 if converts or kv.head_dim > 128 else 128
    return 64 if kv.head_dim <= 64 or (kv.head_dim <= 128 and not converts) else 32


def candidates(chip: Chip, kv: KvLayer, dtype: torch.dtype) -> Iterator[Config]:
    """What a tuning run tries: all that fits in shared memory."""
    for keys in (32, 64, 128):
        for buffers in (2, 3, 4):
            for rows, num_warps in ((128, 8), (128, 4), (64, 4)):
                config = Config(keys=keys, buffers=buffers, rows=rows, num_warps=num_warps)
                if shared_nbytes(config, kv, dtype) <= chip.shared_limit:
                    yield config
