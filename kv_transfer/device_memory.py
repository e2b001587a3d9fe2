"""The paged KV cache of one rank on a device: ``memory.KvMemory`` by the kernels of ``kv_pack``.

1. A pack or scatter takes a lane: a high-priority stream with staging of its own. So links do not
   wait for one another.
2. The stream, and no thread, waits for the event with which the runner says that layers are
   computed. The compute stream waits for nothing.
3. Gather or scatter, the digest on the way, and the check of the blocks' generations are one
   kernel. Slabs on the device are filled or read in place; those in host memory go by way of pinned
   staging, in one asynchronous copy.
4. The sums of the tiles come back by an asynchronous copy, for which the link's thread waits.

A scatter's event goes to ``on_scatter`` as soon as it is enqueued: for a compute stream that is to
read the blocks in a step enqueued before ``scatter`` returns. Later ones need not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.digest import digests
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kernels.kv_pack.slab import KvSlots, Range, Tokens, slab_shape
from kvferry.kernels.kv_pack.wrapper import gather, scatter
from kvferry.kv_transfer.device_lane import Lane
from kvferry.kv_transfer.device_stream import CudaRuntime, DeviceRuntime, Event
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.memory import Form, check_shard
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.transport import Slab

DIGEST = "multiply_sum"
Kernel = Callable[[KvSlots, Tokens, Range, Range, torch.dtype, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Moving:
    """A pack or scatter that is enqueued."""

    finish: Callable[[], list[int]]
    """Wait for its end, once: the digest of each tile. Raises IndexError for a block outside the
    cache.
    """


class DeviceKvMemory:
    """The shard of one rank in device memory. Any number of threads may pack and scatter.

    slots, scales, generations: as ``memory.PagedKvMemory`` has them, but slots and scales are on
    the device. Raises ValueError when they do not fit the layout, or the kernels.
    """

    digests = (DIGEST,)

    def __init__(
        self,
        slots: torch.Tensor,
        layout: KvLayout,
        generations: NDArray[np.uint32],
        *,
        rank: int = 0,
        scales: torch.Tensor | None = None,
        runtime: DeviceRuntime | None = None,
        on_scatter: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._kv = KvSlots(slots, scales)
        self._shard = check_shard(self._kv, layout, rank, len(generations))
        self._kv.check()
        self.layout = layout
        self.rank = rank
        self._generations = generations
        self._runtime = runtime or CudaRuntime(slots.device)
        self._on_scatter = on_scatter
        self._lock = threading.Lock()
        self._idle: list[Lane] = []

    def is_fresh(self, blocks: BlockTable, move: SlabMove) -> bool:
        return blocks.is_fresh(self._generations, move.tokens, self.layout.block_size)

    def pack(
        self,
        blocks: BlockTable,
        move: SlabMove,
        form: Form,
        slab: Slab,
        after: object = None,
        progress: Progress | None = None,
    ) -> list[int]:
        return self.begin_pack(blocks, move, form, slab, after).finish()

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        return self.begin_scatter(blocks, move, form, slab).finish()

    def followed_from(self, blocks: BlockTable, move: SlabMove, form: Form) -> int | None:
        return None

    def follow(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, progress: Progress
    ) -> list[int] | None:
        return None

    def begin_pack(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, after: object = None
    ) -> Moving:
        """Enqueue a pack. Several may be under way at once."""
        lane = self._take_lane()
        if after is not None:
            lane.stream.wait_for(after)
        self._enqueue(gather, lane, blocks, move, form, slab)
        return Moving(lambda: self._finish(lane, blocks, move))

    def begin_scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> Moving:
        """Enqueue a scatter. Several may be under way at once."""
        lane = self._take_lane()
        lane.bring(slab)
        self._enqueue(scatter, lane, blocks, move, form, slab)
        self._on_scatter(lane.stream.record())
        return Moving(lambda: self._finish(lane, blocks, move))

    def _take_lane(self) -> Lane:
        """An idle lane, or a new one. One whose move failed does not come back."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Lane(self._runtime)

    def _enqueue(
        self,
        kernel: Kernel,
        lane: Lane,
        blocks: BlockTable,
        move: SlabMove,
        form: Form,
        slab: Slab,
    ) -> None:
        if form.digest != DIGEST:
            raise ValueError(f"digest: {form.digest} is not computed on a device")
        tokens = lane.upload(blocks, move.tokens, self.layout.block_size, self._generations)
        layers = move.layers.relative_to(self._shard.layers.begin)
        heads = move.heads.relative_to(self._shard.heads.begin)
        wire = getattr(torch, form.wire)
        num_tiles = slab_shape(self._kv, tokens, layers, heads, wire).cut.num_tiles
        on_device = lane.slab_for(slab, move.nbytes)
        lane.run(
            lambda: kernel(self._kv, tokens, layers, heads, wire, on_device),
            1 + num_tiles,
            slab if kernel is gather and on_device is not slab else None,
        )

    def _finish(self, lane: Lane, blocks: BlockTable, move: SlabMove) -> list[int]:
        """Stale blocks are what the caller looks for, before and after."""
        totals = lane.finish()
        with self._lock:
            self._idle.append(lane)
        if totals[0] and self.is_fresh(blocks, move):
            raise IndexError("a block is outside the cache")
        return digests(totals[1:], move.index)
