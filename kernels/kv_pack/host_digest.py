"""The digests that the host can compute over the tiles of a slab, each by its name on the wire.

A tile is digested as one run of bytes: its elements, then the scales of its tokens. Digests depend
on the number of the slab in its transfer and of the tile in its slab: elsewhere, equal bytes have
other digests. They find accidents (flipped bits, torn writes, bytes in the wrong place); attackers
are kept out by the link's secret.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
import xxhash

from kvferry.kernels.kv_pack.digest import COLUMNS, MASK_32, digests, keys
from kvferry.kernels.kv_pack.host_cache import Bytes
from kvferry.kernels.kv_pack.slab import SlabShape
from kvferry.kernels.kv_pack.tiles import Tile


class TileDigests(Protocol):
    """The digests of one slab, made tile by tile in the order of its bytes."""

    def add(self, tile: Tile, elements: Bytes, scales: Bytes) -> None:
        """elements, scales: the bytes of the tile, flat; scales are empty for a float type."""
        ...

    def finish(self) -> list[int]:
        """One 64-bit number per tile."""
        ...


class Xxh3:
    """xxh3-64, seeded with the numbers of slab and tile."""

    def __init__(self, shape: SlabShape, slab_index: int) -> None:
        self._seed = slab_index << 32
        self._values: list[int] = []

    def add(self, tile: Tile, elements: Bytes, scales: Bytes) -> None:
        seed = self._seed | len(self._values)
        if not scales.size:
            self._values.append(xxhash.xxh3_64_intdigest(elements, seed=seed))
            return
        state = xxhash.xxh3_64(elements, seed=seed)
        state.update(scales)
        self._values.append(state.intdigest())

    def finish(self) -> list[int]:
        return self._values


class MultiplySum:
    """What the GPU's kernels compute; see ``digest``. Slow on a host: for links to a GPU."""

    def __init__(self, shape: SlabShape, slab_index: int) -> None:
        self._index = slab_index
        self._tokens_per_row = shape.tokens
        columns = shape.token_words + (shape.heads if shape.is_quantised else 0)
        self._column_keys = keys(torch.arange(columns) | COLUMNS).numpy()
        self._sums: list[np.int64] = []

    def add(self, tile: Tile, elements: Bytes, scales: Bytes) -> None:
        first = tile.row_begin * self._tokens_per_row + tile.token_begin
        count = (tile.row_end - tile.row_begin) * (tile.token_end - tile.token_begin)
        token_keys = keys(torch.arange(first, first + count)).numpy()
        parts = [part.view(np.uint32).reshape(count, -1) for part in (elements, scales)]
        words = np.concatenate(parts, axis=1).astype(np.int64) & MASK_32
        # Sums and products of int64 wrap, as they have to.
        self._sums.append(((words @ self._column_keys + 1) * token_keys).sum())

    def finish(self) -> list[int]:
        return digests(np.array(self._sums, np.int64), self._index)


HOST_DIGESTS: dict[str, type[Xxh3] | type[MultiplySum]] = {
    "xxh3": Xxh3,
    "multiply_sum": MultiplySum,
}
"""Best first."""
