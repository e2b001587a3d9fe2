"""How a slab is cut into tiles: the unit of gather, digest and scatter.

A slab is [rows, tokens, heads, head_dim] with rows = 2 x layers (K and V of each layer in turn). A
tile is a run of whole rows, or of tokens of one row, as near to TILE_BYTES as equal tiles come:
small enough that the digest reads bytes that are still in the cache. Both sides derive the same
tiles from the slab's shape alone; block sizes play no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

TILE_BYTES = 256 * 1024


class Tile(NamedTuple):
    """Rows [row_begin, row_end) x tokens [token_begin, token_end), contiguous at ``offset``."""

    row_begin: int
    row_end: int
    token_begin: int
    token_end: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TileCut:
    """Where the tiles of a slab begin: ``rows_per_tile`` is 1 when a row has several tiles."""

    rows: int
    tokens: int
    rows_per_tile: int
    tokens_per_tile: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, rows: int, tokens: int, row_token_bytes: int) -> TileCut:
        """``row_token_bytes``: one token of one row."""
        row_bytes = tokens * row_token_bytes
        rows_per_tile = max(1, (TILE_BYTES + row_bytes // 2) // row_bytes)
        tiles_per_row = max(1, (row_bytes + TILE_BYTES // 2) // TILE_BYTES)
        return cls(rows, tokens, rows_per_tile, -(-tokens // tiles_per_row))

    @property
    def tiles_per_row(self) -> int:
        return -(-self.tokens // self.tokens_per_tile)

    @property
    def num_tiles(self) -> int:
        """So many digests has the slab."""
        return -(-self.rows // self.rows_per_tile) * self.tiles_per_row


def most_tiles(nbytes: int) -> int:
    """That a slab of so many bytes has at most: one tile of each row, or of all, may be short, and
    the others have two thirds of TILE_BYTES at least.
    """
    return 3 * nbytes // (2 * TILE_BYTES) + 1


def tiles(num_rows: int, num_tokens: int, row_token_bytes: int) -> Iterator[Tile]:
    """The tiles of a slab in order of their bytes. ``row_token_bytes``: one token of one row."""
    cut = TileCut.of(num_rows, num_tokens, row_token_bytes)
    offset = 0
    for row in range(0, num_rows, cut.rows_per_tile):
        row_end = min(row + cut.rows_per_tile, num_rows)
        for token in range(0, num_tokens, cut.tokens_per_tile):
            token_end = min(token + cut.tokens_per_tile, num_tokens)
            nbytes = (row_end - row) * (token_end - token) * row_token_bytes
            yield Tile(row, row_end, token, token_end, offset, nbytes)
            offset += nbytes
