"""The compiled gather and scatter of ``host_pack.c``, where the installation has built them.

The library is optional: without a compiler at installation numpy does the same work. It is called
through ctypes, which lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.progress import Progress, Stream
from kvferry.kernels.kv_pack.slab import SlabShape

ABI = 6
"""As in ``host_pack.c``: a library left behind by an older version is not used."""
SHORT = 240
"""xxh3 treats inputs of so many bytes, and fewer, in other ways, which are not compiled."""
NAME = "_host_pack"
_OUTSIDE, _GIVEN_UP = 1, 2
"""What the move returns, but for 0: as in ``host_pack.c``."""
MOST_HEAD_DIM = 2048
"""Elements are converted so many at a time, whole heads of them: as in ``convert.h``."""
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
"""Converted into each other; in the order of ``convert.h``."""
MOST_PLACES = 1024
"""Shapes of moves whose structures a cache keeps at most."""
LANES = {0: "plain C", 1: "AVX2", 2: "AVX-512"}


_Byte = ctypes.c_char


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("token_bytes", ctypes.c_int64),
    )


class _Range(ctypes.Structure):
    _fields_ = (
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("begin", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens_per_tile", ctypes.c_int64),
        ("rows_per_tile", ctypes.c_int64),
    )


class _Conversion(ctypes.Structure):
    _fields_ = (
        ("cache_type", ctypes.c_int32),
        ("wire_type", ctypes.c_int32),
        ("heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
    )


class _Progress(ctypes.Structure):
    _fields_ = (
        ("word", ctypes.c_void_p),
        ("grant", ctypes.c_uint64),
        ("patience_ns", ctypes.c_int64),
        ("connection", ctypes.c_int64),
        ("moved", ctypes.c_int64),
        ("has_seal", ctypes.c_int64),
    )


class CompiledPack:
    """One library. Raises OSError when it cannot be loaded or has another version."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.kvferry_abi() != ABI:
            raise OSError(f"{path} was built for another version")
        self._move = library.kvferry_move
        self._move.restype = ctypes.c_int
        self._move.argtypes = (
            ctypes.POINTER(_Tensor),
            ctypes.c_int,
            ctypes.POINTER(_Range),
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.POINTER(_Conversion),
            ctypes.POINTER(_Progress),
        )
        self.lanes: str = LANES[library.kvferry_lanes()]
        """What it computes digests with."""

    def does(self, cache: HostCache, move: HostMove, shape: SlabShape) -> bool:
        """Whether it does this move: known types, in xxh3 of tiles that are long enough."""
        cut = shape.cut
        tokens = (shape.tokens - 1) % cut.tokens_per_tile + 1
        rows = (shape.rows - 1) % cut.rows_per_tile + 1
        shortest = rows * tokens * shape.nbytes // (shape.rows * shape.tokens)
        return _is_done(cache, move) and move.digest == "xxh3" and shortest > SHORT

    def gather(
        self,
        cache: HostCache,
        move: HostMove,
        shape: SlabShape,
        slab: memoryview,
        progress: Progress | None = None,
    ) -> list[int]:
        """See ``host``. The move, its shape and the slab are checked. ``progress`` is told of each
        tile.
        """
        digests = self._run(cache, move, shape, slab, True, progress)
        assert digests is not None
        return digests

    def scatter(
        self, cache: HostCache, move: HostMove, shape: SlabShape, slab: memoryview
    ) -> list[int]:
        """The reverse of ``gather``: each byte is read once, digested and written."""
        digests = self._run(cache, move, shape, slab, False, None)
        assert digests is not None
        return digests

    def follow(
        self,
        cache: HostCache,
        move: HostMove,
        shape: SlabShape,
        slab: memoryview,
        progress: Progress,
    ) -> list[int] | None:
        """Scatter each tile as soon as it is filled. None, with some tiles written, when the next
        one is not filled within the patience.
        """
        return self._run(cache, move, shape, slab, False, progress)

    def _run(
        self,
        cache: HostCache,
        move: HostMove,
        shape: SlabShape,
        slab: memoryview,
        is_gather: bool,
        progress: Progress | None,
    ) -> list[int] | None:
        place = _place(cache, move, shape)
        blocks = np.ascontiguousarray(move.blocks, np.int32)
        digests = place.digests()
        by = None
        if cache.dtype is not move.wire:
            # A tile's scales are in this memory until the move is done.
            scales = np.empty(_heads_of_tile(shape), np.float32)
            by = _conversion(cache, shape, scales)
        shared = None if progress is None else _shared(progress)
        status = self._move(
            place.tensors,
            len(place.tensors),
            place.range,
            _address(blocks),
            move.tokens[0],
            ctypes.addressof(_Byte.from_buffer(slab)),
            move.slab_index << 32,
            digests,
            is_gather,
            by,
            shared,
        )
        if progress is not None and shared is not None and isinstance(progress.by, Stream):
            progress.by.moved = shared.moved
        if status == _OUTSIDE:
            raise IndexError(f"blocks: one is outside the cache of {place.range.num_blocks}")
        return None if status == _GIVEN_UP else list(digests)


class _Place(NamedTuple):
    """What all moves of one shape have in common; nothing writes there, so threads share it."""

    tensors: Any
    """[number of the cache's tensors]"""
    range: _Range
    """Without blocks and beginning."""
    digests: Any
    """Makes memory for those of all tiles."""


def _place(cache: HostCache, move: HostMove, shape: SlabShape) -> _Place:
    """Kept with the cache: to fill in structures takes as long as to copy 100 KiB."""
    key = (move.layers[0], move.heads[0], shape)
    place: _Place | None = cache.places.get(key)
    if place is None:
        if len(cache.places) >= MOST_PLACES:
            cache.places.clear()
        place = cache.places[key] = _new_place(cache, move, shape)
    return place


def _new_place(cache: HostCache, move: HostMove, shape: SlabShape) -> _Place:
    tensors = (_Tensor * len(cache.tensors))()
    for tensor, data in zip(tensors, cache.tensors, strict=True):
        offset = 2 * move.layers[0] * data.row_bytes + move.heads[0] * data.head_bytes
        tensor.cache = data.address + offset
        tensor.row_stride = data.row_bytes
        tensor.slot_stride = data.slot_bytes
        tensor.token_bytes = shape.heads * data.head_bytes
    cut, size = shape.cut, cache.block_size
    range_ = _Range(
        None,
        cache.num_slots // size,
        size,
        0,
        shape.tokens,
        shape.rows,
        cut.tokens_per_tile,
        cut.rows_per_tile,
    )
    return _Place(tensors, range_, ctypes.c_uint64 * cut.num_tiles)


def _is_done(cache: HostCache, move: HostMove) -> bool:
    """Whether the types need no conversion, or one that is compiled."""
    if cache.dtype is move.wire:
        return True
    return cache.dtype in TYPES and move.wire in TYPES and cache.head_dim <= MOST_HEAD_DIM


def _heads_of_tile(shape: SlabShape) -> int:
    """At most."""
    rows, tokens = shape.cut.rows_per_tile, shape.cut.tokens_per_tile
    return min(rows, shape.rows) * min(tokens, shape.tokens) * shape.heads


def _conversion(cache: HostCache, shape: SlabShape, scales: NDArray[np.float32]) -> _Conversion:
    """scales: memory for those of a tile."""
    return _Conversion(
        TYPES.index(cache.dtype),
        TYPES.index(shape.dtype),
        shape.heads,
        shape.head_dim,
        _address(scales) if shape.is_quantised else None,
    )


def _shared(progress: Progress) -> _Progress:
    by, patience_ns = progress.by, int(progress.patience_s * 1e9)
    if isinstance(by, Stream):
        return _Progress(None, progress.grant, patience_ns, by.fd, by.moved)
    address = ctypes.addressof(_Byte.from_buffer(by))
    return _Progress(address, progress.grant, patience_ns, 0, 0, progress.has_seal)


def _address(array: NDArray[Any]) -> int:
    """Of its first byte; ``ndarray.ctypes`` takes as long as copying 100 KiB."""
    address: int = array.__array_interface__["data"][0]
    return address


@cache
def compiled_pack() -> CompiledPack | None:
    """The library of this installation; None when there is none that can be used."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(NAME + suffix)
        if path.exists():
            try:
                return CompiledPack(path)
            except (OSError, AttributeError):
                return None
    return None
