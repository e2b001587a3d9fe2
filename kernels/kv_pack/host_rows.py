"""Moves a tile between the paged cache and contiguous memory with numpy, in the longest runs.

Memory is seen as units of bytes that lie together: whole blocks where all heads are moved, else the
largest number of heads that divides both the range and the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.host_cache import Bytes, CacheBytes, HostMove
from kvferry.kernels.kv_pack.tiles import Tile


class _Piece(NamedTuple):
    """Bytes [begin, end) of each row of a tile: of one run of the cache's row, or whole units."""

    begin: int
    end: int
    source: int
    """Where the run begins in the cache's row."""
    units: NDArray[np.int64] | None


class PagedRows:
    """The rows of one tensor of the cache, as one move needs them.

    Raises IndexError for a block outside the cache.
    """

    def __init__(self, tensor: CacheBytes, move: HostMove, block_size: int) -> None:
        self._tensor = tensor
        self._first_row = 2 * move.layers[0]
        self._first_token = move.tokens[0]
        self._blocks = _checked(move, block_size, tensor.num_slots // block_size)
        self._block_size = block_size
        begin, end = move.heads
        self._is_whole = (begin, end) == (0, tensor.num_heads)
        self._token_bytes = (end - begin) * tensor.head_bytes
        together = gcd(begin, end, tensor.num_heads)
        unit_bytes = together * tensor.head_bytes
        if self._is_whole:
            unit_bytes *= block_size
        self._per_slot = tensor.num_heads // together
        self._of_token = begin // together, end // together
        self._units = tensor.units(unit_bytes)
        self._per_row = len(self._units) // len(tensor.rows)
        self._known: dict[tuple[int, int], list[_Piece]] = {}

    def read(self, tile: Tile, out: Bytes) -> None:
        """out: the bytes of the tile, flat."""
        rows = out.reshape(tile.row_end - tile.row_begin, -1)
        for piece in self._pieces(tile):
            part = rows[:, piece.begin : piece.end]
            if piece.units is None:
                part[...] = self._run(tile, piece)
            elif part.flags.c_contiguous:
                # Blocks are checked, so clip changes none; it spares numpy a copy of the result.
                out_units = part.reshape(-1).view(self._units.dtype)
                np.take(self._units, self._index(tile, piece.units), out=out_units, mode="clip")
            else:
                units = self._units[self._index(tile, piece.units)]
                part[...] = units.view(np.uint8).reshape(part.shape)

    def write(self, tile: Tile, values: Bytes) -> None:
        """The reverse of ``read``."""
        rows = values.reshape(tile.row_end - tile.row_begin, -1)
        for piece in self._pieces(tile):
            part = rows[:, piece.begin : piece.end]
            if piece.units is None:
                self._run(tile, piece)[...] = part
            else:
                units = part.reshape(-1).view(self._units.dtype)
                self._units[self._index(tile, piece.units)] = units

    def _pieces(self, tile: Tile) -> list[_Piece]:
        """The tokens of a tile in order. They are the same in all its rows, and in other tiles."""
        tokens = tile.token_begin, tile.token_end
        if tokens not in self._known:
            cut = self._cut_whole if self._is_whole else self._cut_heads
            self._known[tokens] = list(cut(*(self._first_token + token for token in tokens)))
        return self._known[tokens]

    def _cut_whole(self, begin: int, end: int) -> Iterator[_Piece]:
        """Tokens before the first whole block, the whole blocks, those after."""
        size, nbytes = self._block_size, self._token_bytes
        first, last = -(-begin // size) * size, end // size * size
        for a, b in pairwise(sorted({begin, min(first, end), max(last, begin), end})):
            slot = int(self._blocks[a // size]) * size + a % size
            units = self._blocks[a // size : b // size] if (a, b) == (first, last) else None
            yield _Piece((a - begin) * nbytes, (b - begin) * nbytes, slot * nbytes, units)

    def _cut_heads(self, begin: int, end: int) -> Iterator[_Piece]:
        position, size = np.arange(begin, end), self._block_size
        slots = self._blocks[position // size] * size + position % size
        units = _sums(slots * self._per_slot, np.arange(*self._of_token))
        yield _Piece(0, (end - begin) * self._token_bytes, 0, units)

    def _run(self, tile: Tile, piece: _Piece) -> Bytes:
        run = slice(piece.source, piece.source + piece.end - piece.begin)
        first = self._first_row
        return self._tensor.rows[first + tile.row_begin : first + tile.row_end, run]

    def _index(self, tile: Tile, units: NDArray[np.int64]) -> NDArray[np.int64]:
        """The units of each row of a tile, row after row."""
        first, num_rows = self._first_row + tile.row_begin, tile.row_end - tile.row_begin
        if num_rows == 1:
            return units + first * self._per_row
        return _sums(np.arange(first, first + num_rows) * self._per_row, units)


def _checked(move: HostMove, block_size: int, num_blocks: int) -> NDArray[np.int64]:
    """The sequence's blocks; those of the move are in the cache."""
    begin, end = move.tokens
    used = move.blocks[begin // block_size : -(-end // block_size)]
    if used.min() < 0 or used.max() >= num_blocks:
        raise IndexError(f"blocks: one is outside the cache of {num_blocks}")
    return move.blocks.astype(np.int64)


def _sums(outer: NDArray[np.int64], inner: NDArray[np.int64]) -> NDArray[np.int64]:
    """All sums of an outer and an inner number, inner ones fastest, flat."""
    return (outer[:, None] + inner).reshape(-1)
