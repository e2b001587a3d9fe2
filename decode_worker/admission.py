"""Who holds blocks: who may come in, for the first time or from host memory, and who has to go.

The ledger counts what runs, what is reserved or in flight, and what sequences will grow by next.
Blocks that run, are reserved or in flight are out of the pool already, so the pool's free count
less the growth to come is what a newcomer may take.

NOTE on progress. After each admission there is room for the next ``growth_tokens`` of all that
hold blocks: nobody has to go in as many steps, so that moving KV back and forth costs a bounded
share of what is computed in between. A sequence that was given back once comes in *guaranteed*:
with room to its end, and it is never made to go again. What all guaranteed ones hold and will need
is never more than the pool, so that with the others gone they finish. So each request is computed
at most twice, however scarce blocks are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import BlockId
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.engine.ports import Gate, Relief
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.swaps import Swapper


@dataclass(frozen=True, slots=True)
class Ledger:
    """The limits of one decode worker."""

    num_blocks: int
    block_size: int
    max_model_len: int
    growth_tokens: int

    def never_fits(self, length: int) -> str | None:
        """Why a sequence could not run even on an empty worker, or None.

        ``length`` is the tokens it arrives with; one more has to follow for it to be of use here.
        """
        if length < 1:
            return "an empty sequence has no position to sample after"
        if length >= self.max_model_len:
            return f"{length} tokens leave no room in {self.max_model_len}"
        if self._blocks(length + 1) > self.num_blocks:
            return f"{length} tokens and one more need more than all {self.num_blocks} blocks"
        return None

    def admits(self, num_free: int, fresh: int, held_growth: int | None, own_growth: int) -> bool:
        """Whether a newcomer may take ``fresh`` blocks, and ``own_growth`` soon.

        ``held_growth`` is what the sequences that hold blocks may need next, None when there are
        none: what fits alone is let in alone.
        """
        if held_growth is None:
            return num_free >= fresh
        return num_free >= fresh + held_growth + own_growth

    def growth(
        self, lengths: NDArray[np.int64], most: NDArray[np.int64], guaranteed: NDArray[np.bool_]
    ) -> int:
        """Blocks that sequences of ``lengths`` may need within their next ``growth_tokens``, and
        ``guaranteed`` ones to their end at ``most``.
        """
        ahead = np.minimum(lengths + self.growth_tokens, most)
        if guaranteed.any():
            ahead = np.where(guaranteed, np.maximum(most, lengths), ahead)
        return int((self._blocks(ahead) - self._blocks(lengths)).sum())

    def most_growth(self, num_seqs: int) -> int:
        """What so many sequences need within as many tokens at most, none of them guaranteed."""
        return num_seqs * self._blocks(self.growth_tokens)

    def growth_of(self, length: int, most: int, guaranteed: bool) -> int:
        """The same for one sequence."""
        ahead = max(most, length) if guaranteed else min(length + self.growth_tokens, most)
        return self._blocks(ahead) - self._blocks(length)

    @overload
    def _blocks(self, tokens: int) -> int: ...

    @overload
    def _blocks(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def _blocks(self, tokens: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        return (tokens + self.block_size - 1) // self.block_size


class Admission:
    """The queue for blocks of one decode worker."""

    def __init__(
        self,
        sequences: Sequences,
        ledger: Ledger,
        batch: DecodeBatch,
        gate: Gate,
        swapper: Swapper,
        give_back: Callable[[WorkerSequence], None],
        refuse: Callable[[WorkerSequence, str], None],
    ) -> None:
        """``give_back`` ends a sequence of the batch and tells its router, ``refuse`` one that
        waits.
        """
        self.swapper = swapper
        self.waiting: deque[WorkerSequence] = deque()
        """Reservations in order of arrival."""
        self.forks: list[WorkerSequence] = []
        """Sequences that share the blocks of another's prompt, which are not all filled yet."""
        self.preemptions: Counter[Relief] = Counter()
        self._sequences = sequences
        self._ledger = ledger
        self._batch = batch
        self._gate = gate
        self._give_back = give_back
        self._refuse = refuse
        self._held_growth: tuple[int, bool] | None = None
        """Of all that hold blocks, and whether any do; asked once per turn, and kept from then."""

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.forks) + len(self.swapper.swapped)

    def drop(self, seq: WorkerSequence) -> None:
        """A sequence that waits ends."""
        if seq.parent is not None:
            self.forks.remove(seq)
        else:
            self.waiting.remove(seq)

    def turn(self) -> Iterator[WorkerSequence]:
        """Before each step: blocks for those that run, then for those that wait.

        Yields the reservations that hold blocks from now on, each to be granted before the next.
        """
        num_preempted = self.preemptions.total()
        self._held_growth = None
        if self._gate.shut:
            self._ask_gate()
        self._make_room()
        # What was freed is for those for whom others had to go.
        if self.preemptions.total() == num_preempted and self._resume():
            yield from self._fork()
            yield from self._admit()

    def _ask_gate(self) -> None:
        table = self._sequences.table
        for seq in [*self._batch.running, *self._batch.prompts]:
            computed, length = int(table.computed[seq.row]), int(table.length[seq.row])
            relief = self._gate.preempts(seq.key, computed, length)
            if relief is not None:
                self._preempt(seq, relief)

    def _make_room(self) -> None:
        """Give running sequences blocks to go on with, be it those of others."""
        while chosen := self._batch.grow():
            for seq in chosen:
                self._preempt(seq, Relief.SWAP)
        stuck = self._batch.stuck()
        if stuck is not None and not self._blocks_will_come():
            self._give_back(stuck)  # nobody else holds any: it can never fit

    def _blocks_will_come(self) -> bool:
        """Whether a fence will be lifted, or a reservation come to something."""
        num_holders = len(self._sequences.held_rows())
        in_batch = len(self._batch.running) + len(self._batch.prompts)
        return self._sequences.pool.num_fences > 0 or num_holders > in_batch

    def _preempt(self, seq: WorkerSequence, relief: Relief) -> None:
        self._batch.discard(seq)
        if relief is Relief.SWAP and self.swapper.swap_out(seq):
            self.preemptions[Relief.SWAP] += 1
        else:
            self._batch.join(seq)
            self._give_back(seq)

    def _resume(self) -> bool:
        """Let swapped sequences go on while there is room, the oldest first. Returns whether none
        is left: nobody new comes in before.
        """
        table = self._sequences.table
        while self.swapper.swapped:
            seq = self.swapper.swapped[0]
            if self._gate.shut and self._gate.holds(seq.state, seq.key):
                return False
            cached = self.swapper.cached_blocks(seq)
            length, most = int(table.length[seq.row]), int(table.max_length[seq.row])
            if not self._has_room(seq, cached, length, most):
                return False
            if not self.swapper.swap_in(seq, cached):
                return False
            self._batch.join(seq)
        return True

    def _fork(self) -> Iterator[WorkerSequence]:
        """Those whose prompt is here, before any that have yet to bring theirs."""
        for seq in list(self.forks):
            parent = seq.parent
            assert parent is not None, "it forks from nothing"
            if parent.state in (State.CLOSED, State.SWAPPED):
                self._refuse(seq, "the sequence that it forks from is not here any more")
            elif self._sequences.table.computed[parent.row] >= seq.length:
                shared = parent.blocks[: seq.length // self._ledger.block_size]
                if not self._has_room(seq, shared, seq.length, self._most(seq)):
                    return
                if not self.swapper.fork(seq, parent):
                    return
                self.forks.remove(seq)
                seq.parent = None
                yield seq

    def _most(self, seq: WorkerSequence) -> int:
        """Tokens that it may have at its end."""
        most = seq.spec.prompt_len + seq.spec.sampling.max_tokens
        return min(most, self._ledger.max_model_len)

    def _admit(self) -> Iterator[WorkerSequence]:
        """Reservations in order of arrival, while the ledger has room for the first."""
        sequences = self._sequences
        while self.waiting:
            seq = self.waiting[0]
            if self._gate.shut and self._gate.holds(seq.state, seq.key):
                return
            # A local prompt computes its last position here; otherwise all KV may be cached.
            cached = sequences.cached_blocks(seq, seq.length - seq.local)
            if not self._has_room(seq, cached, seq.length, self._most(seq)):
                return
            if not sequences.hold(seq, cached, reserved=True):
                return
            self.waiting.popleft()
            yield seq

    def _has_room(self, seq: WorkerSequence, cached: list[BlockId], length: int, most: int) -> bool:
        """For its ``length`` tokens now, and what it grows to on its way to ``most``."""
        sequences, table, ledger = self._sequences, self._sequences.table, self._ledger
        fresh = sequences.blocks_for(length) - len(cached)
        # Acquiring cached blocks takes them out of what others could evict.
        free = sequences.pool.num_free - sequences.pool.num_free_among(cached)
        if self._held_growth is None:
            # Where there is plenty, nobody needs to count: the sum below would say the same.
            most_growth = ledger.most_growth(table.num_lent + 1)
            any_guaranteed = seq.guaranteed or table.guaranteed.any()
            if free >= fresh + most_growth and not any_guaranteed:
                return True
            held = sequences.held_rows()
            lengths, most_of = table.length[held], table.max_length[held]
            growth = ledger.growth(lengths, most_of, table.guaranteed[held])
            self._held_growth = (growth, bool(held.size))
        growth, is_held = self._held_growth
        own = ledger.growth_of(length, most, seq.guaranteed)
        fits = ledger.admits(free, fresh, growth if is_held else None, own)
        if fits:
            self._held_growth = (growth + own, True)  # it is taken in next
        return fits
