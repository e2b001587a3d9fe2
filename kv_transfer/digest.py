"""Digests of slabs: xxh3-64 per tile, dependent on position.

They find accidents: flipped bits, torn writes, bytes in the wrong place. Attackers are kept out by
the link's secret, not by these.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash


def tile_digest(slab_index: int) -> Callable[[int, memoryview], int]:
    """The digest function of one slab: in other places, equal bytes have other digests."""

    def digest(tile: int, data: memoryview) -> int:
        value: int = xxhash.xxh3_64_intdigest(data, seed=slab_index << 32 | tile)
        return value

    return digest
