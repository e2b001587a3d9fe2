"""The block pool under random schedules, against a model that only knows who holds what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvferry.cache.block_pool import BlockPool, BlockState
from kvferry.cache.hashing import chain_hashes, root_hash
from kvferry.core.ids import BlockHash, BlockId

ROOT = root_hash(1, b"", "", "float32", "float32")
BLOCK_SIZE = 2
NUM_BLOCKS = 12

# Two tokens and short prompts, so that prefixes are often shared.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass(eq=False)
class Sequence:
    """A holder of blocks."""

    hashes: list[BlockHash]
    table: list[BlockId]
    num_published: int
    reserved: list[BlockId] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: Counter[BlockId] = Counter()
        self.fences: dict[int, list[BlockId]] = {}
        self.content: dict[BlockId, BlockHash] = {}
        self.parents: dict[BlockHash, BlockHash] = {}
        self.generations = [0] * NUM_BLOCKS
        self.replayed: set[BlockHash] = set()
        self.next_fence = 0

    def taken(self, blocks: list[BlockId]) -> None:
        """Check blocks that the pool just handed out: nobody holds or may still use them."""
        pinned = {block for fenced in self.fences.values() for block in fenced}
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert not self.holders[block]
            assert block not in pinned
            self.content.pop(block, None)
            self.generations[block] += 1
        self.holders.update(blocks)

    @rule(target=sequences, tokens=PROMPTS, commit=st.booleans())
    def start(self, tokens: list[int], commit: bool) -> object:
        hashes = chain_hashes(ROOT, tokens, BLOCK_SIZE)
        # At least the last position is always computed.
        found = self.pool.match(hashes[: (len(tokens) - 1) // BLOCK_SIZE])
        assert [self.content[block] for block in found] == hashes[: len(found)]
        missing = -(-len(tokens) // BLOCK_SIZE) - len(found)
        fits = missing <= self.pool.num_free - self.pool.num_free_among(found)
        self.pool.acquire(found)
        self.holders.update(found)
        blocks = self.pool.reserve(missing)
        assert (blocks is not None) == fits
        if blocks is None:
            self.drop(found, None)
            return multiple()
        self.taken(blocks)
        sequence = Sequence(hashes, found + blocks, len(found))
        if commit:
            self.pool.commit(blocks)
        else:
            sequence.reserved = blocks
        return sequence

    @rule(sequence=sequences)
    def commit(self, sequence: Sequence) -> None:
        self.pool.commit(sequence.reserved)
        sequence.reserved = []

    @rule(sequence=sequences, count=st.integers(1, 4))
    def publish(self, sequence: Sequence, count: int) -> None:
        if sequence.reserved:
            return
        chain = [ROOT, *sequence.hashes]
        for i in range(sequence.num_published, len(sequence.hashes))[:count]:
            block = sequence.table[i]
            named = self.pool.publish(block, chain[i + 1], chain[i])
            assert named == (self.pool.match(sequence.hashes[: i + 1])[-1] == block)
            self.content[block] = chain[i + 1]
            self.parents[chain[i + 1]] = chain[i]
            sequence.num_published = i + 1

    @rule(sequence=sequences)
    def grow(self, sequence: Sequence) -> None:
        blocks = self.pool.allocate(1)
        if blocks is not None:
            self.taken(blocks)
            sequence.table += blocks

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: Sequence) -> object:
        if sequence.reserved:
            return multiple()
        self.pool.acquire(sequence.table)
        self.holders.update(sequence.table)
        return Sequence(sequence.hashes, list(sequence.table), sequence.num_published)

    @rule(sequence=consumes(sequences), fenced=st.booleans())
    def end(self, sequence: Sequence, fenced: bool) -> None:
        self.next_fence += fenced
        self.drop(sequence.table, self.next_fence if fenced else None)

    def drop(self, blocks: list[BlockId], fence: int | None) -> None:
        self.pool.release(blocks, fence)
        self.holders.subtract(blocks)
        if fence is not None and blocks:
            self.fences[fence] = list(blocks)

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def lift(self, data: st.DataObject) -> None:
        fence = data.draw(st.sampled_from(sorted(self.fences)))
        self.pool.lift(fence)
        del self.fences[fence]

    @rule()
    def take_all(self) -> None:
        """What num_free promises can be had, to the last block."""
        blocks = self.pool.reserve(self.pool.num_free)
        assert blocks is not None
        self.taken(blocks)
        assert self.pool.reserve(1) is None
        self.drop(blocks, None)

    @rule()
    def replay(self) -> None:
        events = self.pool.drain_events()
        added, removed = set(events.added), set(events.removed)
        assert len(events.added) == len(added)
        assert len(events.removed) == len(removed)
        assert not added & self.replayed
        assert removed <= self.replayed
        self.replayed = (self.replayed - removed) | added
        assert self.replayed == set(self.pool.snapshot())

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        states = [self.pool.state(BlockId(i)) for i in range(NUM_BLOCKS)]
        counts = self.pool.counts()
        assert counts.total == NUM_BLOCKS
        assert counts.free == states.count(BlockState.FREE)
        assert counts.reserved == states.count(BlockState.RESERVED)
        assert counts.in_use == states.count(BlockState.IN_USE)
        assert counts.cached == states.count(BlockState.CACHED)
        assert counts.fenced == states.count(BlockState.FENCED)
        pinned = {block for fenced in self.fences.values() for block in fenced}
        for i, state in enumerate(states):
            block = BlockId(i)
            held = state in (BlockState.RESERVED, BlockState.IN_USE)
            assert held == (self.holders[block] > 0)
            if state is BlockState.IN_USE:
                assert self.pool.ref_count(block) == self.holders[block]
            if state is BlockState.FREE:
                assert block not in pinned
            if state is BlockState.FENCED:
                assert block in pinned
        assert self.pool.num_fences == len(self.fences)

    @invariant()
    def generations_rise_only_at_allocation(self) -> None:
        assert self.pool.generations.tolist() == self.generations

    @invariant()
    def parents_outlive_children(self) -> None:
        snapshot = self.pool.snapshot()
        seen = {ROOT}
        for block_hash in snapshot:
            assert self.parents[block_hash] in seen
            seen.add(block_hash)
        assert len(seen) == len(snapshot) + 1


PoolMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
