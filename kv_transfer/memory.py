"""The paged KV cache as the KV plane sees it: bytes in and out of the blocks of one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.host import can_follow, follow, gather, scatter
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_compiled import compiled_pack
from kvferry.kernels.kv_pack.host_digest import HOST_DIGESTS
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kernels.kv_pack.slab import KvSlots
from kvferry.kernels.kv_pack.tiles import TILE_BYTES
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import QUANTISED_BYTES, KvLayout, Shard
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.transport import Slab

LEAST_FOLLOWED = 2 * TILE_BYTES
"""Bytes: a scatter that follows a pack is a tile behind it."""


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
        self,
        blocks: BlockTable,
        move: SlabMove,
        form: Form,
        slab: Slab,
        after: object = None,
        progress: Progress | None = None,
    ) -> list[int]:
        """Fill a slab of ``move.nbytes`` from the blocks; the digest of each tile.

        ``after``: an event of the device that the pack has to wait for, as the runner gave it.
        ``progress``: told of each tile, where ``followed_from`` says so.
        """
        ...

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        """Write a slab into the blocks; the digest of each tile, of the very bytes written."""
        ...

    def followed_from(self, blocks: BlockTable, move: SlabMove, form: Form) -> int | None:
        """From how many bytes on it is worth to scatter a slab of such a move while it is filled;
        None where packs do not tell their progress, or scatters cannot follow them.
        """
        ...

    def follow(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, progress: Progress
    ) -> list[int] | None:
        """``scatter`` while the slab is being filled. None, with part of it written or nothing,
        when the pack does not go on, or ``followed_from`` says no.
        """
        ...


class PagedKvMemory:
    """The shard of one rank in host memory.

    slots: [layers, 2, num_blocks * block_size, heads, head_dim] of the shard, contiguous; scales:
    float32 [layers, 2, num_blocks * block_size, heads], for a quantised cache; generations:
    [num_blocks], the block pool's live array. Raises ValueError when they do not fit the layout.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        layout: KvLayout,
        generations: NDArray[np.uint32],
        *,
        rank: int = 0,
        scales: torch.Tensor | None = None,
        use_compiled: bool = True,
    ) -> None:
        kv = KvSlots(slots, scales)
        self._shard = check_shard(kv, layout, rank, len(generations))
        self._cache = HostCache(kv, layout.block_size)
        self._compiled = compiled_pack() if use_compiled else None
        self.layout = layout
        self.rank = rank
        # 32-bit words are what multiply_sum adds up.
        self.digests = tuple(
            scheme for scheme in HOST_DIGESTS if scheme == "xxh3" or layout.head_dim % 4 == 0
        )
        self._generations = generations

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
        host_move = self._host_move(blocks, move, form)
        return gather(self._cache, host_move, slab, self._compiled, progress)

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        return scatter(self._cache, self._host_move(blocks, move, form), slab, self._compiled)

    def followed_from(self, blocks: BlockTable, move: SlabMove, form: Form) -> int | None:
        host_move = self._host_move(blocks, move, form)
        return LEAST_FOLLOWED if can_follow(self._cache, host_move) else None

    def follow(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, progress: Progress
    ) -> list[int] | None:
        host_move = self._host_move(blocks, move, form)
        return follow(self._cache, host_move, slab, self._compiled, progress)

    def _host_move(self, blocks: BlockTable, move: SlabMove, form: Form) -> HostMove:
        return HostMove(
            blocks=blocks.block_ids,
            tokens=move.tokens,
            layers=move.layers.relative_to(self._shard.layers.begin),
            heads=move.heads.relative_to(self._shard.heads.begin),
            wire=getattr(torch, form.wire),
            digest=form.digest,
            slab_index=move.index,
        )


def check_shard(kv: KvSlots, layout: KvLayout, rank: int, num_blocks: int) -> Shard:
    """What a rank holds. Raises ValueError unless its cache is that of the layout."""
    shard = layout.shard(rank)
    shape = (shard.layers.length, 2, num_blocks * layout.block_size, shard.heads.length)
    _check("slots", kv.elements, (*shape, layout.head_dim), layout.dtype)
    if (kv.scales is not None) != (layout.dtype in QUANTISED_BYTES):
        raise ValueError(f"scales: a cache of {layout.dtype} has them, or not")
    if kv.scales is not None:
        _check("scales", kv.scales, shape, "float32")
    return shard


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} are {tuple(tensor.shape)}, the layout says {shape}, contiguous")
    if tensor.dtype != getattr(torch, dtype):
        raise ValueError(f"{name} are {tensor.dtype}, the layout says {dtype}")
