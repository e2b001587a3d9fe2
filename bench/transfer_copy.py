"""The two-copy bound's copies: what each side of a transfer does with its bytes, without a link."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from enum import StrEnum

import xxhash

from kvferry.bench.transfer_cache import BenchCache, PlainMemory, Walk
from kvferry.kernels.kv_pack.tiles import TILE_BYTES
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import SlabMove, best_slab_bytes, cut
from kvferry.kv_transfer.transport import Slab


class Copying(StrEnum):
    """Which of the two copies."""

    OUT = "out"
    """From blocks into a slab, as a sender does."""
    IN = "in"
    """From a slab into blocks, as a receiver does."""


class Copies:
    """Copies with digest between the blocks that transfers move, part after part, and one slab."""

    def __init__(self, cache: BenchCache, slab_bytes: int) -> None:
        """``slab_bytes``: the most that a slab of a link holds."""
        self._blocks, self._memory, self._layout = cache.blocks, cache.memory, cache.layout
        self._form = Form(cache.layout.dtype, cache.memory.digests[0])
        self._run = PlainMemory(cache.layout, cache.slots)
        # Written: pages that nobody wrote are all the same page of zeros.
        self._slab = memoryview(bytearray(b"\1") * slab_bytes)
        self._numbers = itertools.count()

    def rate(self, copying: Copying, walk: Walk, seconds: float) -> float:
        """Bytes per second, over whole transfers, of the faster of two: the moves that a transfer
        makes, and as many bytes of one run, copied by numpy and digested while they are hot.
        """
        slab_bytes = best_slab_bytes(walk.tokens * self._layout.token_bytes, len(self._slab))
        ways: list[tuple[Callable[[SlabMove, Slab], object], int]]
        if copying is Copying.OUT:
            ways = [(self._pack, slab_bytes), (self._copy_out, TILE_BYTES)]
        else:
            ways = [(self._scatter, slab_bytes), (self._copy_in, TILE_BYTES)]
        return max(self._rate(copy, walk, nbytes, seconds / len(ways)) for copy, nbytes in ways)

    def _rate(
        self,
        copy: Callable[[SlabMove, Slab], object],
        walk: Walk,
        slab_bytes: int,
        seconds: float,
    ) -> float:
        whole, head_bytes = self._layout.whole, self._layout.head_bytes
        copied, took, started = 0, 0.0, time.perf_counter()
        while took < seconds:
            for move in cut(whole, walk.part(next(self._numbers)), head_bytes, slab_bytes):
                copy(move, self._slab[: move.nbytes])
                copied += move.nbytes
            took = time.perf_counter() - started
        return copied / took

    def _pack(self, move: SlabMove, slab: Slab) -> None:
        self._memory.pack(self._blocks, move, self._form, slab)

    def _scatter(self, move: SlabMove, slab: Slab) -> None:
        self._memory.scatter(self._blocks, move, self._form, slab)

    def _copy_out(self, move: SlabMove, slab: Slab) -> None:
        self._run.pack(self._blocks, move, self._form, slab)
        xxhash.xxh3_64_intdigest(slab)

    def _copy_in(self, move: SlabMove, slab: Slab) -> None:
        self._run.scatter(self._blocks, move, self._form, slab)
        xxhash.xxh3_64_intdigest(slab)
