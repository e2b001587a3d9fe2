"""The two-copy bound's copies: one thread that copies and digests as fast as this project can."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import numpy as np
import xxhash

from kvferry.bench.transfer_cache import BLOCK_SIZE, BenchCache, cache_layout
from kvferry.kernels.kv_pack.host_compiled import compiled_pack
from kvferry.kernels.kv_pack.tiles import TILE_BYTES
from kvferry.kv_transfer.layout import Span
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import SlabMove


def copy_rate(nbytes: int, seconds: float) -> float:
    """Bytes per second of the faster of two: numpy's copy with xxh3 over each tile while it is hot,
    and the compiled pack, where there is one, from blocks that stand in order.
    """
    copies = _copies(nbytes)
    return max(_rate(copy, nbytes, seconds / len(copies)) for copy in copies)


@cache
def _copies(nbytes: int) -> list[Callable[[], None]]:
    copies = [_numpy_copy(nbytes)]
    if compiled_pack() is not None:
        copies.append(_compiled_copy(nbytes))
    return copies


def _numpy_copy(nbytes: int) -> Callable[[], None]:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    tiles = [slice(begin, begin + TILE_BYTES) for begin in range(0, nbytes, TILE_BYTES)]

    def copy() -> None:
        for tile in tiles:
            np.copyto(target[tile], source[tile])
            xxhash.xxh3_64_intdigest(target[tile])

    return copy


def _compiled_copy(nbytes: int) -> Callable[[], None]:
    layout = cache_layout(BLOCK_SIZE)
    tokens = nbytes // layout.token_bytes
    blocks = BenchCache(layout, tokens, None)
    whole = layout.whole
    move = SlabMove(0, whole.layers, whole.heads, Span(0, tokens), tokens * layout.token_bytes)
    slab = memoryview(bytearray(move.nbytes))
    form = Form(layout.dtype, "xxh3")

    def copy() -> None:
        blocks.memory.pack(blocks.blocks, move, form, slab)

    return copy


def _rate(copy: Callable[[], None], nbytes: int, seconds: float) -> float:
    copy()
    copied, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        copy()
        copied += nbytes
    return copied / (time.perf_counter() - started)
