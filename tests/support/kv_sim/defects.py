"""Defects of the building blocks, for tests that ask whether schedules find them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from enum import StrEnum

from kvferry.cache.block_pool import BlockPool
from kvferry.core.ids import BlockId


class Defect(StrEnum):
    NONE = "none"
    NO_FENCES = "no fences"
    """Blocks are free while a pack or a scatter of them runs."""
    NO_GENERATIONS = "no generations"
    """Nobody asks whether blocks were given away."""
    EARLY_LAYERS = "early layers"
    """A layer is said to be done when the one before it is."""


class UnfencedPool(BlockPool):
    """A pool that forgets what is running."""

    def release(self, blocks: Sequence[BlockId], fence: Hashable | None = None) -> None:
        super().release(blocks)
