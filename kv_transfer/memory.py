"""The paged KV cache as the KV plane sees it: bytes in and out of the blocks of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.host import gather, scatter
from kvferry.kv_transfer.digest import tile_digest
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.transport import Slab


@dataclass(frozen=True, slots=True)
class Form:
    """How a slab is written."""

    wire: str
    """Element type."""
    digest: str
    """Scheme."""


class KvMemory(Protocol):
    """What sender and receiver need of one rank's KV cache. Moves count layers and heads as the
    model does; the memory finds them in its shard.
    """

    @property
    def layout(self) -> KvLayout: ...

    @property
    def rank(self) -> int: ...

    @property
    def digests(self) -> tuple[str, ...]:
        """Digest schemes that it can compute, best first."""
        ...

    def is_fresh(self, blocks: BlockTable, move: SlabMove) -> bool:
        """Whether the blocks of a move still have the generations they were leased with."""
        ...

    def pack(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, after: object = None
    ) -> list[int]:
        """Fill a slab of ``move.nbytes`` from the blocks; the digest of each tile.

        ``after``: an event of the device that the pack has to wait for, as the runner gave it.
        """
        ...

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        """Write a slab into the blocks; the digest of each tile, of the very bytes written."""
        ...


class PagedKvMemory:
    """A paged cache in host memory.

    slots: [num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim], contiguous;
    generations: [num_blocks], the block pool's live array. Raises ValueError when they do not fit
    the layout.
    """

    def __init__(
        self, slots: torch.Tensor, layout: KvLayout, generations: NDArray[np.uint32]
    ) -> None:
        num_slots = len(generations) * layout.block_size
        shape = (layout.num_layers, 2, num_slots, layout.num_kv_heads, layout.head_dim)
        if tuple(slots.shape) != shape or not slots.is_contiguous():
            raise ValueError(f"slots are {tuple(slots.shape)}, the layout says {shape}, contiguous")
        if slots.dtype != getattr(torch, layout.dtype):
            raise ValueError(f"slots are {slots.dtype}, the layout says {layout.dtype}")
        self.layout = layout
        self._slots = slots
        self._generations = generations

    def is_fresh(self, blocks: BlockTable, move: SlabMove) -> bool:
        return blocks.is_fresh(self._generations, move.tokens, self.layout.block_size)

    def pack(self, blocks: BlockTable, move: SlabMove, slab: memoryview) -> list[int]:
        ids = torch.from_numpy(blocks.slot_ids(move.tokens, self.layout.block_size))
        return gather(self._slots, ids, move.layers, move.heads, slab, tile_digest(move.index))

    def scatter(self, blocks: BlockTable, move: SlabMove, slab: memoryview) -> list[int]:
        ids = torch.from_numpy(blocks.slot_ids(move.tokens, self.layout.block_size))
        return scatter(self._slots, ids, move.layers, move.heads, slab, tile_digest(move.index))
