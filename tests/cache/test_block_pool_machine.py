"""The block pool under random schedules, against a model that only knows who holds what."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvferry.cache.block_pool import BlockPool, BlockState
from kvferry.cache.hashing import chain_hashes, root_hash
from kvferry.core.ids import BlockHash, BlockId

ROOT = root_hash(1, b"", "", "float32", "float32")
BLOCK_SIZE = 2
NUM_BLOCKS = 16

# Most of them prefixes of each other, so that sharing is the rule.
PROMPTS = [[0] * 3, [0] * 5, [0] * 9, [0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0], [1] * 5]
HELD = (BlockState.RESERVED, BlockState.IN_USE)


@dataclass(eq=False)
class Sequence:
    """A holder of blocks."""

    hashes: list[BlockHash]
    table: list[BlockId]
    num_published: int
    reserved: list[BlockId] = field(default_factory=list)


class Model:
    """Drives a pool as sequences do, and checks all that it hands out."""

    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[Sequence] = []
        self.holders: Counter[BlockId] = Counter()
        self.fences: dict[int, list[BlockId]] = {}
        self.content: dict[BlockId, BlockHash] = {}
        self.parents: dict[BlockHash, BlockHash] = {}
        self.generations = [0] * NUM_BLOCKS
        self.replayed: set[BlockHash] = set()
        self.num_fences = 0

    def taken(self, blocks: list[BlockId] | None) -> list[BlockId]:
        """Check blocks that the pool just handed out: nobody holds or may still use them."""
        assert blocks is not None
        pinned = {block for fenced in self.fences.values() for block in fenced}
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            assert not self.holders[block]
            assert block not in pinned
            self.content.pop(block, None)
            self.generations[block] += 1
        self.holders.update(blocks)
        return blocks

    def start(self, tokens: list[int]) -> None:
        hashes = chain_hashes(ROOT, tokens, BLOCK_SIZE)
        # At least the last position is always computed (fault B011).
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
        else:
            self.taken(blocks)
            self.live.append(Sequence(hashes, found + blocks, len(found), blocks))

    def commit(self, sequence: Sequence) -> None:
        self.pool.commit(sequence.reserved)
        sequence.reserved = []

    def publish(self, sequence: Sequence, count: int) -> None:
        self.commit(sequence)
        chain = [ROOT, *sequence.hashes]
        for i in range(sequence.num_published, len(sequence.hashes))[:count]:
            block = sequence.table[i]
            named = self.pool.publish(block, chain[i + 1], chain[i])
            assert named == (self.pool.match(sequence.hashes[: i + 1])[-1] == block)
            self.content[block] = chain[i + 1]
            self.parents[chain[i + 1]] = chain[i]
            sequence.num_published = i + 1

    def grow(self, sequence: Sequence) -> None:
        if self.pool.num_free:
            sequence.table += self.taken(self.pool.allocate(1))

    def fork(self, sequence: Sequence) -> None:
        self.commit(sequence)
        self.pool.acquire(sequence.table)
        self.holders.update(sequence.table)
        self.live.append(Sequence(sequence.hashes, [*sequence.table], sequence.num_published))

    def end(self, sequence: Sequence, fenced: bool) -> None:
        self.num_fences += fenced
        self.drop(sequence.table, self.num_fences if fenced else None)
        self.live.remove(sequence)

    def drop(self, blocks: list[BlockId], fence: int | None) -> None:
        self.pool.release(blocks, fence)
        self.holders.subtract(blocks)
        if fence is not None:
            self.fences[fence] = list(blocks)

    def lift(self, index: int) -> None:
        if self.fences:
            fence = sorted(self.fences)[index % len(self.fences)]
            self.pool.lift(fence)
            del self.fences[fence]

    def squeeze(self, count: int) -> None:
        """Evict: take blocks as far as num_free promises them, and give them back."""
        self.drop(self.taken(self.pool.reserve(min(count, self.pool.num_free))), None)

    def replay(self) -> None:
        events = self.pool.drain_events()
        added, removed = set(events.added), set(events.removed)
        assert (len(added), len(removed)) == (len(events.added), len(events.removed))
        assert not added & self.replayed
        assert removed <= self.replayed
        self.replayed = (self.replayed - removed) | added
        assert self.replayed == set(self.pool.snapshot())

    def step(self, action: str, index: int, count: int) -> None:
        """One action; ``index`` picks the sequence, prompt or fence it is about."""
        if action == "start":
            self.start(PROMPTS[index % len(PROMPTS)])
        elif action in ("lift", "squeeze", "replay"):
            {"lift": self.lift, "squeeze": self.squeeze}.get(action, lambda _: self.replay())(index)
        elif self.live:
            sequence = self.live[index % len(self.live)]
            {
                "commit": lambda: self.commit(sequence),
                "publish": lambda: self.publish(sequence, count),
                "grow": lambda: self.grow(sequence),
                "fork": lambda: self.fork(sequence),
                "end": lambda: self.end(sequence, fenced=False),
                "end fenced": lambda: self.end(sequence, fenced=True),
            }[action]()

    def check(self) -> None:
        states = [self.pool.state(BlockId(i)) for i in range(NUM_BLOCKS)]
        counts = self.pool.counts()
        assert counts.total == NUM_BLOCKS
        named = [counts.free, counts.reserved, counts.in_use, counts.cached, counts.fenced]
        assert named == [states.count(state) for state in BlockState]
        pinned = {block for fenced in self.fences.values() for block in fenced}
        for i, state in enumerate(states):
            block = BlockId(i)
            assert (state in HELD) == (self.holders[block] > 0)
            assert state is not BlockState.IN_USE or (
                self.pool.ref_count(block) == self.holders[block]
            )
            assert state is not BlockState.FREE or block not in pinned
            assert state is not BlockState.FENCED or block in pinned
        assert self.pool.num_fences == len(self.fences)
        assert self.pool.generations.tolist() == self.generations
        self.check_parents_come_first()

    def check_parents_come_first(self) -> None:
        seen = {ROOT}
        for block_hash in self.pool.snapshot():
            assert self.parents[block_hash] in seen
            assert block_hash not in seen
            seen.add(block_hash)

    def finish(self) -> None:
        """What num_free promises can be had, to the last block; at the end all blocks are back."""
        self.squeeze(NUM_BLOCKS)
        for sequence in list(self.live):
            self.end(sequence, fenced=False)
        for _ in list(self.fences):
            self.lift(0)
        assert self.pool.num_free == NUM_BLOCKS
        self.squeeze(NUM_BLOCKS)
        self.replay()
        assert self.pool.counts().free == NUM_BLOCKS
        assert not self.replayed


# Weights of the random walk: enough starts to keep the pool busy, enough ends to make room.
ACTIONS = {
    "start": 5,
    "publish": 6,
    "end": 2,
    "end fenced": 2,
    "lift": 2,
    "squeeze": 2,
    "replay": 1,
    "commit": 1,
    "grow": 1,
    "fork": 1,
}


class PoolMachine(RuleBasedStateMachine):
    """Hypothesis searches for, and shrinks, a schedule that breaks the model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    @rule(action=st.sampled_from(list(ACTIONS)), index=st.integers(0, 7), count=st.integers(1, 4))
    def step(self, action: str, index: int, count: int) -> None:
        self.model.step(action, index, count)

    @invariant()
    def check(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.finish()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("walk", range(20))
def test_random_walk(walk: int) -> None:
    """Long schedules, which reach a full pool with copies, pins and evictions at the same time."""
    rng = random.Random(walk)
    model = Model()
    for action in rng.choices(list(ACTIONS), weights=list(ACTIONS.values()), k=400):
        model.step(action, rng.randrange(8), rng.randint(1, 4))
        model.check()
    model.finish()
