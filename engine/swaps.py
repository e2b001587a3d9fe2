"""Blocks that are moved: of sequences that wait without any, their KV in host memory until there is
room again, and of sequences that begin with a prompt which is here already. Pure.

A swap is part of a step. Out: the blocks stay pinned until the step that copies them has run, so
that nothing else is written to them before. In: blocks that are still findable are taken as they
are, and the others are filled at the start of the step in which the sequence may go on.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

import numpy as np

from kvferry.cache.block_pool import BlockPool
from kvferry.core.ids import BlockId
from kvferry.engine.plan import StepPlan
from kvferry.engine.sequences import Sequences, State, WorkerSequence

SWAP_FENCE = "swap"
"""One for all: every swap ends with the step that it is part of."""
_age_order = attrgetter("age_order")


class Swapper:
    """The host slots of one worker and the sequences in them."""

    def __init__(self, sequences: Sequences, num_slots: int) -> None:
        self.swapped: list[WorkerSequence] = []
        """Oldest first."""
        self.num_slots = num_slots
        self._sequences = sequences
        self._free = list(range(num_slots - 1, -1, -1))
        self._out: list[tuple[BlockId, int]] = []
        self._in: list[tuple[int, BlockId]] = []
        self._copies: list[tuple[BlockId, BlockId]] = []
        self._moved: list[WorkerSequence] = []
        """Those that the next step, or the one under way, moves."""
        self._emptied: list[int] = []
        """Slots that it reads."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def swap_out(self, seq: WorkerSequence) -> bool:
        """Take the blocks of a sequence whose step is over; False without enough host slots.

        The blocks are free once the next step has run: ``settle``.
        """
        sequences = self._sequences
        count = sequences.blocks_for(int(sequences.table.computed[seq.row]))
        assert seq not in self._moved, "its blocks are not filled yet"
        if count > len(self._free):
            return False
        seq.slots = [self._free.pop() for _ in range(count)]
        self._out += zip(seq.blocks, seq.slots, strict=False)
        sequences.let_go(seq, SWAP_FENCE if count else None)
        seq.swapped_from = seq.state
        seq.enter(State.SWAPPED)
        insort(self.swapped, seq, key=_age_order)
        if count:
            self._moved.append(seq)
        return True

    def cached_blocks(self, seq: WorkerSequence) -> list[BlockId]:
        """What of a swapped sequence is findable; no reference is taken."""
        return self._sequences.cached_blocks(seq, int(self._sequences.table.computed[seq.row]))

    def swap_in(self, seq: WorkerSequence, cached: list[BlockId]) -> bool:
        """Give it blocks for all its tokens, and its state back; False without enough blocks."""
        if not self._sequences.hold_again(seq, cached):
            return False
        kept = len(cached)
        self._in += zip(seq.slots[kept:], seq.blocks[kept:], strict=False)
        self._emptied += seq.slots
        seq.slots = []
        self.swapped.remove(seq)
        seq.enter(seq.swapped_from)
        self._moved.append(seq)
        return True

    def fork(self, seq: WorkerSequence, parent: WorkerSequence) -> bool:
        """Give a new sequence the KV of its prompt, which another holds: full blocks are shared, of
        the last one it gets a copy to write on. False without room for it.
        """
        sequences = self._sequences
        size = sequences.table.block_size
        shared = parent.blocks[: seq.length // size]
        if not sequences.hold(seq, shared, reserved=True):
            return False
        seq.cached_tokens = seq.length
        if seq.length % size:
            tail = parent.blocks[len(shared)]
            self._copies.append((tail, seq.blocks[-1]))
            # Its owner may end before the step that copies it has run.
            self._pool.acquire([tail])
            self._pool.release([tail], SWAP_FENCE)
            self._moved.append(seq)
        return True

    def discard(self, seq: WorkerSequence) -> None:
        """A swapped sequence ends. Its slots may be written again by any later step."""
        self.swapped.remove(seq)
        self._free += seq.slots
        seq.slots = []

    @property
    def has_moves(self) -> bool:
        return bool(self._out or self._in or self._copies)

    def add_moves(self, plan: StepPlan) -> None:
        """Make the swaps and copies since the last step part of this one."""
        if self._out:
            plan.swap_out = np.array(self._out, np.int32)
        if self._in:
            plan.swap_in = np.array(self._in, np.int32)
        if self._copies:
            plan.copies = np.array(self._copies, np.int32)

    def settle(self) -> None:
        """The step has run."""
        if not self._moved:
            return
        self._pool.lift(SWAP_FENCE)
        self._free += self._emptied
        for moves in (self._out, self._in, self._copies, self._moved, self._emptied):
            moves.clear()

    def failed(self) -> list[WorkerSequence]:
        """The step has failed. Returns the sequences whose KV may be neither here nor there."""
        moved = [seq for seq in self._moved if seq.state is not State.CLOSED]
        self.settle()
        return moved

    @property
    def _pool(self) -> BlockPool:
        return self._sequences.pool
