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
    run: slice
    """Of the cache's row, in bytes."""
    units: NDArray[np.int64] | None


class PagedRows:
    """The rows of one tensor of the cache, as one move needs them."""

    def __init__(
        self, tensor: CacheBytes, move: HostMove, blocks: NDArray[np.int64], block_size: int
    ) -> None:
        """blocks: of ``checked_blocks``."""
        self._first_token = move.tokens[0]
        self._blocks = blocks
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
        rows = slice(2 * move.layers[0], 2 * move.layers[1])
        self._rows = tensor.rows[rows]
        self._units = tensor.units(unit_bytes)[rows]
        self._unit = self._units.dtype
        self._known: dict[tuple[int, int], list[_Piece]] = {}

    def read(self, tile: Tile, out: Bytes) -> None:
        """out: the bytes of the tile, flat."""
        row, row_end, first, last, _, _ = tile
        pieces = self._known.get((first, last)) or self._cut(first, last)
        if row_end - row > 1:
            self._read_rows(slice(row, row_end), pieces, out)
            return
        for begin, end, run, units in pieces:
            if units is None:
                out[begin:end] = self._rows[row, run]
            else:
                # Blocks are checked, so clip changes none; it spares numpy a copy of the result.
                self._units[row].take(units, 0, out[begin:end].view(self._unit), "clip")

    def write(self, tile: Tile, values: Bytes) -> None:
        """The reverse of ``read``."""
        row, row_end, first, last, _, _ = tile
        pieces = self._known.get((first, last)) or self._cut(first, last)
        if row_end - row > 1:
            self._write_rows(slice(row, row_end), pieces, values)
            return
        for begin, end, run, units in pieces:
            if units is None:
                self._rows[row, run] = values[begin:end]
            else:
                self._units[row][units] = values[begin:end].view(self._unit)

    def _read_rows(self, rows: slice, pieces: list[_Piece], out: Bytes) -> None:
        of_rows = out.reshape(rows.stop - rows.start, -1)
        for piece in pieces:
            part = of_rows[:, piece.begin : piece.end]
            if piece.units is None:
                part[...] = self._rows[rows, piece.run]
            elif part.flags.c_contiguous:
                self._units[rows].take(piece.units, 1, part.view(self._unit), "clip")
            else:
                part[...] = self._units[rows].take(piece.units, 1).view(np.uint8)

    def _write_rows(self, rows: slice, pieces: list[_Piece], values: Bytes) -> None:
        of_rows = values.reshape(rows.stop - rows.start, -1)
        for piece in pieces:
            part = of_rows[:, piece.begin : piece.end]
            if piece.units is None:
                self._rows[rows, piece.run] = part
            else:
                self._units[rows, piece.units] = part.view(self._unit)

    def _cut(self, begin: int, end: int) -> list[_Piece]:
        """The tokens of a tile in order. They are the same in all its rows, and in other tiles."""
        cut = self._cut_whole if self._is_whole else self._cut_heads
        pieces = list(cut(self._first_token + begin, self._first_token + end))
        self._known[begin, end] = pieces
        return pieces

    def _cut_whole(self, begin: int, end: int) -> Iterator[_Piece]:
        """Tokens before the first whole block, the whole blocks, those after."""
        size, nbytes = self._block_size, self._token_bytes
        first, last = -(-begin // size) * size, end // size * size
        for a, b in pairwise(sorted({begin, min(first, end), max(last, begin), end})):
            place = (int(self._blocks[a // size]) * size + a % size) * nbytes
            length = (b - a) * nbytes
            units = self._blocks[a // size : b // size] if (a, b) == (first, last) else None
            at = (a - begin) * nbytes
            yield _Piece(at, at + length, slice(place, place + length), units)

    def _cut_heads(self, begin: int, end: int) -> Iterator[_Piece]:
        position, size = np.arange(begin, end), self._block_size
        slots = self._blocks[position // size] * size + position % size
        units = (slots * self._per_slot)[:, None] + np.arange(*self._of_token)
        yield _Piece(0, (end - begin) * self._token_bytes, slice(0), units.reshape(-1))


def checked_blocks(move: HostMove, block_size: int, num_blocks: int) -> NDArray[np.int64]:
    """The sequence's blocks. Raises IndexError unless those of the move are in the cache."""
    begin, end = move.tokens
    blocks = move.blocks.astype(np.int64)
    # Without a sign, a negative number is a large one.
    if blocks[begin // block_size : -(-end // block_size)].view(np.uint64).max() >= num_blocks:
        raise IndexError(f"blocks: one is outside the cache of {num_blocks}")
    return blocks
