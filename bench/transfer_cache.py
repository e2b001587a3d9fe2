"""Caches whose KV the transfer bench moves, and the ways to move it."""

from __future__ import annotations

import random
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import torch

from kvferry.core.span import Span
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import QUANTISED_BYTES, KvLayout
from kvferry.kv_transfer.memory import Form, KvMemory, PagedKvMemory
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.transport import Slab

BLOCK_SIZE = 16
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 64
"""As in Llama 3.2 1B: 32 KiB a token in bf16, 4 GiB in its longest context."""
_PATTERN = 1 << 20
"""Random elements, repeated: 4 GiB of fresh ones would take longer than to move them."""


def cache_layout(block_size: int, dtype: str = "bfloat16") -> KvLayout:
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
    )


class Copier(StrEnum):
    """How KV gets into slabs and out of them."""

    BEST = "best"
    """As in workers: compiled, where that was built."""
    NUMPY = "numpy"
    PLAIN = "plain"
    """See ``PlainMemory``."""


class Walk(NamedTuple):
    """Which tokens transfers of equal length move: by its number each another part than the last,
    as in service, where no KV is sent twice in a row and processors' caches do not hold it.
    """

    tokens: int
    """Of one transfer."""
    held: int
    """Of the sequence, from its beginning, that parts are taken of."""
    whole: int
    """Where parts may begin."""

    def part(self, number: int) -> Span:
        places = (self.held - self.tokens) // self.whole + 1
        begin = number * (-(-self.tokens // self.whole)) % places * self.whole
        return Span(begin, begin + self.tokens)


class PlainMemory:
    """Copies slabs out of, or into, one run of memory: neither pages nor digests.

    What a transfer costs with it is what links and copies cost.
    """

    def __init__(self, layout: KvLayout, slots: torch.Tensor) -> None:
        self.layout = layout
        self.rank = 0
        self.digests = ("none",)
        self._num_slots = slots.shape[2]
        self._bytes = slots.view(torch.uint8).view(-1).numpy()

    def is_fresh(self, blocks: BlockTable, move: SlabMove) -> bool:
        return True

    def pack(
        self,
        blocks: BlockTable,
        move: SlabMove,
        form: Form,
        slab: Slab,
        after: object = None,
        progress: Progress | None = None,
    ) -> list[int]:
        np.copyto(np.frombuffer(slab, np.uint8), self._part(move))
        return []

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        np.copyto(self._part(move), np.frombuffer(slab, np.uint8))
        return []

    def followed_from(self, blocks: BlockTable, move: SlabMove, form: Form) -> int | None:
        return None

    def follow(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, progress: Progress
    ) -> list[int] | None:
        return None

    def _part(self, move: SlabMove) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """As many bytes as the move has, at a place of their own: slabs of several layers have all
        tokens of them.
        """
        layer_bytes = self._num_slots * self.layout.layer_token_bytes
        begin = move.layers.begin * layer_bytes
        begin += move.tokens.begin * move.layers.length * self.layout.layer_token_bytes
        return self._bytes[begin : begin + move.nbytes]


class BenchCache:
    """Paged KV of one sequence, all of it touched."""

    def __init__(
        self, layout: KvLayout, tokens: int, order: int | None, copier: Copier = Copier.BEST
    ) -> None:
        """``order``: as of ``block_order``."""
        num_blocks = -(-tokens // layout.block_size)
        shape = (
            layout.num_layers,
            2,
            num_blocks * layout.block_size,
            layout.num_kv_heads,
            layout.head_dim,
        )
        dtype = getattr(torch, layout.dtype)
        self.slots = torch.empty(shape, dtype=dtype)
        pattern = torch.randn(_PATTERN, generator=torch.Generator().manual_seed(0)).to(dtype)
        for part in self.slots.view(-1).split(_PATTERN):
            part.copy_(pattern[: len(part)])
        scales = torch.ones(shape[:-1]) if layout.dtype in QUANTISED_BYTES else None
        generations = np.zeros(num_blocks, np.uint32)
        self.layout = layout
        paged = PagedKvMemory(
            self.slots,
            layout,
            generations,
            scales=scales,
            use_compiled=copier is Copier.BEST,
        )
        self.memory: KvMemory = paged
        if copier is Copier.PLAIN:
            self.memory = PlainMemory(layout, self.slots)
        ids = np.array(block_order(num_blocks, order), np.int32)
        self.blocks = BlockTable(block_ids=ids, generations=generations[ids])


def block_order(num_blocks: int, order: int | None) -> list[int]:
    """Where the blocks of a sequence stand: one after the other, or, as in a cache that has been in
    use, anywhere; ``order`` is the seed.
    """
    blocks = list(range(num_blocks))
    if order is not None:
        random.Random(order).shuffle(blocks)
    return blocks
