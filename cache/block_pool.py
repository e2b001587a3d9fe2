"""The one class that changes block states.

              reserve              commit               publish (stays IN_USE, findable)
      FREE ───────────▶ RESERVED ───────────▶ IN_USE ──────────────┐
       ▲ ▲                 │ release            │ release, ref 0   │ release, ref 0, findable
       │ └─────────────────┴────────────────────┤                  ▼
       │ lift                                   │ fence pending  CACHED ──▶ IN_USE   acquire
       └────────────────────────── FENCED ◀─────┘                  │
      FREE ◀───────────────────────────────────────────────────────┘   evicted by reserve

Fences. ``release(blocks, fence=token)`` says that an operation which names these blocks may still
be running; ``lift(token)`` says that it has completed. Until then the blocks are *pinned*, whatever
else happens to them:

* a pinned block without findable content waits in FENCED, never in FREE;
* a pinned findable block goes to CACHED, may be found and acquired again (its content is final, and
  the running operation at most reads it or writes the same bytes), but is not evicted, nor counted
  by ``num_free``;
* a pin holds also on blocks that someone else still references, so that a later release cannot free
  them early;
* pins of several fences add up; a block is free of pins when all of them are lifted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvferry.cache.prefix_index import CacheEvents, PrefixIndex
from kvferry.core.ids import BlockHash, BlockId


class BlockState(Enum):
    """Exactly one per block."""

    # Enum hashes by name, in Python; these are looked up for every block that changes state.
    __hash__ = object.__hash__

    FREE = "free"
    RESERVED = "reserved"
    IN_USE = "in_use"
    CACHED = "cached"
    FENCED = "fenced"


class BlockStateError(AssertionError):
    """A caller broke the rules of the pool: a defect of this program, never of a request."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks per state; the sum is the size of the pool, always."""

    free: int
    reserved: int
    in_use: int
    cached: int
    fenced: int

    @property
    def total(self) -> int:
        return self.free + self.reserved + self.in_use + self.cached + self.fenced


class BlockPool:
    """States, references, generations and findability of blocks. No tensors, no locks."""

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1:
            raise BlockStateError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self.generations: NDArray[np.uint32] = np.zeros(num_blocks, dtype=np.uint32)
        """Raised at every allocation; leases record it, and pack and scatter compare it."""
        self._index = PrefixIndex(num_blocks)
        self._states = [BlockState.FREE] * num_blocks
        self._refs = [0] * num_blocks
        self._pins = [0] * num_blocks
        self._fences: dict[Hashable, list[BlockId]] = {}
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        self._counts = dict.fromkeys(BlockState, 0)
        self._counts[BlockState.FREE] = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that ``reserve`` could hand out now: FREE, and CACHED ones that nothing pins."""
        return len(self._free) + self._index.num_evictable

    def counts(self) -> BlockCounts:
        counts = self._counts
        return BlockCounts(
            free=counts[BlockState.FREE],
            reserved=counts[BlockState.RESERVED],
            in_use=counts[BlockState.IN_USE],
            cached=counts[BlockState.CACHED],
            fenced=counts[BlockState.FENCED],
        )

    def state(self, block: BlockId) -> BlockState:
        return self._states[block]

    def ref_count(self, block: BlockId) -> int:
        return self._refs[block]

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest findable prefix of a chain. Takes no reference: acquire next."""
        return self._index.match(hashes)

    def num_free_among(self, blocks: Iterable[BlockId]) -> int:
        """How many of these ``num_free`` counts: what ``acquire(blocks)`` takes from it."""
        return sum(map(self._index.is_evictable, blocks))

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Take one reference on each: found blocks, or blocks shared with another sequence."""
        for block in blocks:
            state = self._states[block]
            if state is BlockState.CACHED:
                self._index.withdraw(block)
                self._move(block, BlockState.IN_USE)
            elif state is not BlockState.IN_USE:
                raise BlockStateError(f"block {block} is {state.name}: it cannot be acquired")
            self._refs[block] += 1

    def reserve(self, count: int) -> list[BlockId] | None:
        """FREE -> RESERVED, evicting CACHED blocks as needed: all ``count`` blocks, or None."""
        return self._take(count, BlockState.RESERVED)

    def commit(self, blocks: Sequence[BlockId]) -> None:
        """RESERVED -> IN_USE with one reference."""
        states, refs = self._states, self._refs
        reserved, in_use = BlockState.RESERVED, BlockState.IN_USE
        for block in blocks:
            if states[block] is not reserved:
                raise BlockStateError(f"block {block} is {states[block].name}, not RESERVED")
            states[block] = in_use
            refs[block] = 1
        self._count(len(blocks), reserved, in_use)

    def allocate(self, count: int) -> list[BlockId] | None:
        """``reserve`` and ``commit`` in one: blocks with one reference, or None."""
        blocks = self._take(count, BlockState.IN_USE)
        for block in blocks or ():
            self._refs[block] = 1
        return blocks

    def publish(self, block: BlockId, block_hash: BlockHash, parent_hash: BlockHash) -> bool:
        """Make a full, computed or verified IN_USE block findable; True when it is the one found.

        A sequence publishes in order, parents first. Where another block holds the hash already,
        this one stays an anonymous copy (and takes over if the other is evicted first). Saying it
        twice is harmless.
        """
        self.publish_all([block], [block_hash], [parent_hash])
        return self._index.is_findable(block)

    def publish_all(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash],
    ) -> None:
        """``publish`` for several blocks, in order."""
        if not self.prefix_cache:
            return
        states, in_use = self._states, BlockState.IN_USE
        for block in blocks:
            if states[block] is not in_use:
                raise BlockStateError(f"block {block} is {states[block].name}, not IN_USE")
        wrong = self._index.add_all(blocks, hashes, parents)
        if wrong is not None:
            raise BlockStateError(f"block {wrong} is already published under another hash")

    def release(self, blocks: Sequence[BlockId], fence: Hashable | None = None) -> None:
        """Drop one reference on each, or end its reservation.

        ``blocks`` are in table order, first to last. ``fence``: see the head of this file; None
        means that nothing launched names these blocks any more.
        """
        pinned = self._fences.setdefault(fence, []) if fence is not None and blocks else None
        states, refs, pins = self._states, self._refs, self._pins
        in_use, cached, num_cached = BlockState.IN_USE, BlockState.CACHED, 0
        is_findable, offer = self._index.is_findable, self._index.offer
        # Last to first, so that of one chain the deepest block is the first to be evicted.
        for block in reversed(blocks):
            state = states[block]
            if state is in_use:
                refs[block] -= 1
            elif state is not BlockState.RESERVED:
                raise BlockStateError(f"block {block} is {state.name}: it has no holder to release")
            if pinned is not None:
                pins[block] += 1
                pinned.append(block)
            if refs[block]:
                continue
            if is_findable(block):
                states[block] = cached
                num_cached += 1
                if not pins[block]:
                    offer(block)
            elif pins[block]:
                self._move(block, BlockState.FENCED)
            else:
                self._set_free(block)
        self._count(num_cached, in_use, cached)

    def lift(self, fence: Hashable) -> None:
        """The operation behind this fence has completed. A fence that holds nothing is no error."""
        for block in self._fences.pop(fence, ()):
            self._pins[block] -= 1
            if self._pins[block]:
                continue
            if self._states[block] is BlockState.FENCED:
                self._set_free(block)
            elif self._states[block] is BlockState.CACHED:
                self._index.offer(block)

    def num_sole(self, blocks: Iterable[BlockId]) -> int:
        """How many of these have one holder alone: what ``release(blocks)`` makes available."""
        return sum(self._refs[block] == 1 for block in blocks)

    def num_fenced_by(self, fence: Hashable) -> int:
        """Blocks without holders that this fence pins: what ``lift`` makes available, unless
        another fence pins them too.
        """
        return sum(not self._refs[block] for block in set(self._fences.get(fence, ())))

    def is_fenced(self, fence: Hashable) -> bool:
        """Whether this fence pins any block."""
        return fence in self._fences

    @property
    def num_fences(self) -> int:
        """Fences that pin at least one block."""
        return len(self._fences)

    def drain_events(self) -> CacheEvents:
        """Net changes of the findable hashes since the last call."""
        return self._index.drain_events()

    def snapshot(self) -> list[BlockHash]:
        """All findable hashes, parents before children; undrained events are already in it."""
        return self._index.snapshot()

    def _take(self, count: int, state: BlockState) -> list[BlockId] | None:
        """FREE -> ``state``, evicting as needed: all ``count`` blocks, or None."""
        if count > self.num_free:
            return None
        if count > len(self._free):
            self._evict(count - len(self._free))
        split = len(self._free) - count
        blocks = self._free[split:]
        del self._free[split:]
        blocks.reverse()
        states = self._states
        for block in blocks:
            states[block] = state
        self._count(count, BlockState.FREE, state)
        if blocks:
            self.generations[np.array(blocks)] += np.uint32(1)
        return blocks

    def _set_free(self, block: BlockId) -> None:
        # A fenced copy is remembered until here: nothing has overwritten it.
        if self._index.hash_of(block) is not None:
            self._index.forget_copy(block)
        self._move(block, BlockState.FREE)
        self._free.append(block)

    def _evict(self, count: int) -> None:
        """CACHED -> FREE."""
        try:
            blocks, heirs = self._index.evict(count)
        except LookupError:
            raise BlockStateError("a child block is held without its parent") from None
        states = self._states
        for block in blocks:
            states[block] = BlockState.FREE
        self._free += blocks
        self._count(count, BlockState.CACHED, BlockState.FREE)
        for heir in heirs:
            if states[heir] is BlockState.FENCED:
                self._move(heir, BlockState.CACHED)

    def _move(self, block: BlockId, state: BlockState) -> None:
        self._count(1, self._states[block], state)
        self._states[block] = state

    def _count(self, num_blocks: int, before: BlockState, after: BlockState) -> None:
        self._counts[before] -= num_blocks
        self._counts[after] += num_blocks
