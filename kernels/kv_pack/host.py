"""Gather and scatter on the CPU: the slabs of ``reference``, in host memory.

The copies are numpy's: they let other threads run, and unlike torch's they start no team of threads
beside the one that the model computes with. Bytes stand in for the types that numpy lacks. torch
converts element types, in pieces too small for a team.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from kvferry.kernels.kv_layer import QUANTISED_TYPES, dequantised, quantised
from kvferry.kernels.kv_pack.host_cache import Bytes, HostCache, HostMove
from kvferry.kernels.kv_pack.host_compiled import CompiledPack
from kvferry.kernels.kv_pack.host_digest import HOST_DIGESTS, TileDigests
from kvferry.kernels.kv_pack.host_rows import PagedRows, checked_blocks
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kernels.kv_pack.slab import SlabShape
from kvferry.kernels.kv_pack.tiles import Tile, tiles

PIECE = 1 << 15
"""Elements: torch converts so many, or fewer, in the thread that asks."""
SCALE_BYTES = 4


def gather(
    cache: HostCache,
    move: HostMove,
    slab: memoryview,
    compiled: CompiledPack | None = None,
    progress: Progress | None = None,
) -> list[int]:
    """Fill ``slab`` with what ``move`` says, in its wire's type; the digest of each tile.

    ``progress`` is told of each tile. Raises ValueError for what does not fit, IndexError for a
    block outside the cache.
    """
    shape = _checked(cache, move, slab)
    if compiled is not None and compiled.does(cache, move, shape):
        return compiled.gather(cache, move, shape, slab, progress)
    digests = HOST_DIGESTS[move.digest](shape, move.slab_index)
    return gather_tiles(cache, move, slab, digests, progress)


def scatter(
    cache: HostCache, move: HostMove, slab: memoryview, compiled: CompiledPack | None = None
) -> list[int]:
    """Write ``slab`` where ``move`` says, in the cache's type; the digest of each tile, of the very
    bytes written. Raises as ``gather`` does.
    """
    shape = _checked(cache, move, slab)
    if compiled is not None and compiled.does(cache, move, shape):
        return compiled.scatter(cache, move, shape, slab)
    digests = HOST_DIGESTS[move.digest](shape, move.slab_index)
    found = scatter_tiles(cache, move, slab, digests)
    assert found is not None
    return found


def can_follow(cache: HostCache, move: HostMove) -> bool:
    """Whether there are tiles to wait for."""
    return cache.shape(move).cut.num_tiles > 1


def follow(
    cache: HostCache,
    move: HostMove,
    slab: memoryview,
    compiled: CompiledPack | None,
    progress: Progress,
) -> list[int] | None:
    """``scatter`` while the slab is being filled, tile by tile. None when the other side does not
    go on; some tiles may have been written then. Raises as ``gather`` does.
    """
    shape = _checked(cache, move, slab)
    if compiled is not None and compiled.does(cache, move, shape):
        return compiled.follow(cache, move, shape, slab, progress)
    digests = HOST_DIGESTS[move.digest](shape, move.slab_index)
    return scatter_tiles(cache, move, slab, digests, progress)


def gather_tiles(
    cache: HostCache,
    move: HostMove,
    slab: memoryview,
    digests: TileDigests,
    progress: Progress | None = None,
) -> list[int]:
    """``gather`` with numpy: each tile is digested while its bytes are hot."""
    view, pages = _SlabView(cache.shape(move), slab), _CacheView(cache, move)
    for number, tile in enumerate(view.tiles, 1):
        elements, scales = part = view.part(tile)
        if cache.dtype is move.wire:
            pages.read(tile, elements, scales)
        else:
            values = pages.memory(tile)
            pages.read(tile, *values)
            _convert(values, cache.dtype, part, move.wire, cache.head_dim)
        digests.add(tile, elements, scales)
        if progress is not None:
            progress.tell_filled(number)
    return digests.finish()


def scatter_tiles(
    cache: HostCache,
    move: HostMove,
    slab: memoryview,
    digests: TileDigests,
    progress: Progress | None = None,
) -> list[int] | None:
    """``scatter`` with numpy, or ``follow``. A peer that shares the slab may change it at any
    moment, so each tile is first copied to private memory, and digest and write both read that
    copy.
    """
    view, pages = _SlabView(cache.shape(move), slab), _CacheView(cache, move)
    for number, tile in enumerate(view.tiles, 1):
        if progress is not None and not progress.wait_filled(number):
            return None
        elements, scales = part = _private.copy(view.part(tile))
        digests.add(tile, elements, scales)
        if cache.dtype is move.wire:
            pages.write(tile, elements, scales)
        else:
            values = pages.memory(tile)
            _convert(part, move.wire, values, cache.dtype, cache.head_dim)
            pages.write(tile, *values)
    if progress is not None and progress.has_seal:
        progress.wait_filled(len(view.tiles) + 1)
    return digests.finish()


def _checked(cache: HostCache, move: HostMove, slab: memoryview) -> SlabShape:
    shape = cache.shape(move)
    if slab.nbytes != shape.nbytes:
        raise ValueError(f"slab: holds {slab.nbytes} bytes, the range {shape.nbytes}")
    return shape


class _Part(NamedTuple):
    """The bytes of a tile, flat."""

    elements: Bytes
    """Of [rows, tokens, h, D]."""
    scales: Bytes
    """Of float32 [rows, tokens, h]; none in a float type."""


class _Private(threading.local):
    """Memory of a thread for one tile, kept: what goes back to the system costs a fault a page when
    it comes again.
    """

    def __init__(self) -> None:
        self._part = _Part(np.empty(0, np.uint8), np.empty(0, np.uint8))

    def copy(self, part: _Part) -> _Part:
        """Lasts until the next one."""
        theirs, their_scales = part
        ours, our_scales = self._part
        if ours.size != theirs.size or our_scales.size != their_scales.size:
            ours, our_scales = np.empty_like(theirs), np.empty_like(their_scales)
            self._part = _Part(ours, our_scales)
        np.copyto(ours, theirs)
        if their_scales.size:
            np.copyto(our_scales, their_scales)
        return self._part


_private = _Private()


class _SlabView:
    """A slab by its tiles."""

    def __init__(self, shape: SlabShape, slab: memoryview) -> None:
        self._token_bytes = shape.token_nbytes
        self._scale_bytes = shape.heads * SCALE_BYTES
        flat = np.frombuffer(slab, np.uint8)
        self._elements, self._scales = flat[: shape.elements_nbytes], flat[shape.elements_nbytes :]
        self.tiles = _tiles(shape.rows, shape.tokens, self._token_bytes)

    def part(self, tile: Tile) -> _Part:
        begin, end = tile.offset, tile.offset + tile.nbytes
        elements = self._elements[begin:end]
        if not self._scales.size:
            return _Part(elements, self._scales)
        begin, end = (at // self._token_bytes * self._scale_bytes for at in (begin, end))
        return _Part(elements, self._scales[begin:end])


@lru_cache(maxsize=64)
def _tiles(num_rows: int, num_tokens: int, row_token_bytes: int) -> tuple[Tile, ...]:
    """Slab after slab is cut alike."""
    return tuple(tiles(num_rows, num_tokens, row_token_bytes))


class _CacheView:
    """What is moved, by the tiles of its slab. Raises IndexError for a block outside the cache."""

    def __init__(self, cache: HostCache, move: HostMove) -> None:
        size = cache.block_size
        blocks = checked_blocks(move, size, cache.num_slots // size)
        self._elements, *self._scales = (
            PagedRows(tensor, move, blocks, size) for tensor in cache.tensors
        )
        self._num_heads = move.heads[1] - move.heads[0]
        self._head_bytes = cache.elements.head_bytes

    def read(self, tile: Tile, elements: Bytes, scales: Bytes) -> None:
        self._elements.read(tile, elements)
        for rows in self._scales:
            rows.read(tile, scales)

    def write(self, tile: Tile, elements: Bytes, scales: Bytes) -> None:
        self._elements.write(tile, elements)
        for rows in self._scales:
            rows.write(tile, scales)

    def memory(self, tile: Tile) -> _Part:
        """For a tile in the cache's type."""
        num_rows, num_tokens = tile.row_end - tile.row_begin, tile.token_end - tile.token_begin
        heads = num_rows * num_tokens * self._num_heads
        scales = heads * SCALE_BYTES if self._scales else 0
        return _Part(np.empty(heads * self._head_bytes, np.uint8), np.empty(scales, np.uint8))


def _convert(
    source: _Part, source_dtype: torch.dtype, target: _Part, dtype: torch.dtype, head_dim: int
) -> None:
    """Elements and scales in another type, in pieces that torch converts without a team."""
    from_values, from_scales = _typed(source, source_dtype, head_dim)
    to_values, to_scales = _typed(target, dtype, head_dim)
    length = max(1, PIECE // head_dim)
    for begin in range(0, len(from_values), length):
        piece = slice(begin, begin + length)
        values = from_values[piece]
        if len(from_scales):
            values = dequantised(values, from_scales[piece])
        if dtype in QUANTISED_TYPES:
            values, to_scales[piece] = quantised(values, dtype)
        to_values[piece] = values.to(dtype)


def _typed(part: _Part, dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [heads of the tile, D] and float32 scales [heads of the tile]."""
    elements = torch.from_numpy(part.elements).view(dtype).view(-1, head_dim)
    return elements, torch.from_numpy(part.scales.view(np.float32))
