"""Sequences on a worker: their states, their blocks, and the one place where both are taken and
given back.

    prefill worker      WAITING ─▶ PREFILLING ─▶ TRANSFERRING ─▶ CLOSED
    decode worker       WAITING ─▶ RESERVED ─▶ DECODING ─▶ CLOSED
    local prefill       WAITING ─▶ RESERVED ─▶ PREFILLING ─▶ DECODING ─▶ CLOSED
    out of blocks       PREFILLING or DECODING ─▶ SWAPPED ─▶ what it was

Every state may go straight to CLOSED: by cancel, deadline, lost session or failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvferry.cache.block_pool import BlockPool
from kvferry.cache.hashing import block_hash, chain_hashes
from kvferry.core.ids import AttemptKey, BlockHash, BlockId, Incarnation, LeaseId
from kvferry.engine.ports import RouterPort
from kvferry.engine.table import Rows, SequenceTable
from kvferry.proto import worker_pb2 as pb

NO_LEASE = LeaseId(0)


class State(StrEnum):
    WAITING = "waiting"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    SWAPPED = "swapped"
    CLOSED = "closed"


_NEXT = {
    State.WAITING: {State.RESERVED, State.PREFILLING, State.CLOSED},
    State.RESERVED: {State.PREFILLING, State.DECODING, State.CLOSED},
    State.PREFILLING: {State.TRANSFERRING, State.DECODING, State.SWAPPED, State.CLOSED},
    State.TRANSFERRING: {State.CLOSED},
    State.DECODING: {State.SWAPPED, State.CLOSED},
    State.SWAPPED: {State.PREFILLING, State.DECODING, State.CLOSED},
    State.CLOSED: set(),
}


@dataclass(slots=True, eq=False)
class WorkerSequence:
    """One attempt of one request on this worker."""

    key: AttemptKey
    port: RouterPort
    spec: pb.SequenceSpec
    arrived_s: float
    deadline_s: float
    """On this worker's clock: when it ends whatever its router says."""
    ends_s: float
    """When it ends unless its lease is renewed; never past the deadline."""
    hashes: list[BlockHash]
    """Chain of the full blocks known so far."""
    born_s: float
    """On this worker's clock: when its router took the request in, whichever attempt this is."""
    state: State = State.WAITING
    lease: LeaseId = NO_LEASE
    row: int = -1
    """In the table, once it has blocks."""
    blocks: list[BlockId] = field(default_factory=list)
    published: int = 0
    """Leading blocks that are findable, or were when they were acquired."""
    cached_tokens: int = 0
    overtaken: int = 0
    """Tokens of younger prompts that were computed while it waited for its own."""
    started_s: float = 0.0
    target: pb.Target | None = None
    """Prefill: where its KV goes."""
    sending: bool = False
    """Prefill: the sender has yet to say its last word on it."""
    sent: pb.Account | None = None
    """Prefill: what the sender counted, once all is delivered."""
    local: bool = False
    """Decode: it is prefilled here."""
    first_token: int | None = None
    """Decode: known once the router said Start."""
    verified: bool = False
    """Decode: all its KV is here and verified."""
    parent: WorkerSequence | None = None
    """Decode: the sequence of the same prompt whose blocks it is to share."""
    received: pb.Account | None = None
    """Decode: what the receiver counted, if KV came from outside."""
    slots: list[int] = field(default_factory=list)
    """SWAPPED: host slots of its computed blocks, first to last."""
    swapped_from: State = State.CLOSED
    """SWAPPED: the state that it goes back to."""

    @property
    def length(self) -> int:
        """Tokens it arrived with."""
        return len(self.spec.token_ids)

    @property
    def age_order(self) -> tuple[float, AttemptKey]:
        """Sorts the oldest request first."""
        return self.born_s, self.key

    @property
    def guaranteed(self) -> bool:
        """It was given back once: it keeps its blocks to the end."""
        return self.spec.given_back > 0

    def enter(self, state: State) -> None:
        if state not in _NEXT[self.state]:
            raise AssertionError(f"{self.key}: {self.state} cannot become {state}")
        self.state = state


class Sequences:
    """All live sequences of a worker, their rows and their blocks."""

    def __init__(
        self,
        table: SequenceTable,
        pool: BlockPool,
        root: BlockHash,
        clock: Callable[[], float],
        lease_s: float,
        vocab_size: int,
    ) -> None:
        self.table = table
        self.pool = pool
        self.root = root
        self.clock = clock
        self.lease_s = lease_s
        self.vocab_size = vocab_size
        self.by_row: dict[int, WorkerSequence] = {}
        self._live: dict[tuple[Incarnation, int], WorkerSequence] = {}
        self._first_end_s = math.inf
        """No live sequence ends before."""

    def __iter__(self) -> Iterator[WorkerSequence]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def get(self, key: AttemptKey) -> WorkerSequence | None:
        """The live sequence of exactly this attempt."""
        seq = self._live.get((key.router, key.request))
        return seq if seq is not None and seq.key.attempt == key.attempt else None

    def of_request(self, router: Incarnation, request: int) -> WorkerSequence | None:
        """The live sequence of a request, whichever attempt it is."""
        return self._live.get((router, request))

    def supersede(self, key: AttemptKey, end: Callable[[WorkerSequence], None]) -> bool:
        """Make way: ``end`` an earlier attempt of the same request. False: ``key`` is the stale
        one, or its blocks are still fenced since it ended.
        """
        if self.pool.is_fenced(key):
            return False
        seq = self._live.get((key.router, key.request))
        if seq is None:
            return True
        if seq.key.attempt >= key.attempt:
            return False
        end(seq)
        return True

    def open(self, key: AttemptKey, port: RouterPort, spec: pb.SequenceSpec) -> WorkerSequence:
        """A new sequence in WAITING, without row or blocks."""
        now = self.clock()
        deadline_s = now + spec.deadline_s
        seq = WorkerSequence(
            key=key,
            port=port,
            spec=spec,
            arrived_s=now,
            deadline_s=deadline_s,
            ends_s=min(deadline_s, now + self.lease_s),
            hashes=chain_hashes(self.root, spec.token_ids, self.table.block_size),
            born_s=now - spec.age_s,
        )
        self._live[key.router, key.request] = seq
        self._first_end_s = min(self._first_end_s, seq.ends_s)
        return seq

    def cached_blocks(self, seq: WorkerSequence, num_tokens: int) -> list[BlockId]:
        """Findable blocks of the first ``num_tokens`` tokens; no reference is taken."""
        return self.pool.match(seq.hashes[: num_tokens // self.table.block_size])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.table.block_size)

    def hold(self, seq: WorkerSequence, cached: Sequence[BlockId], *, reserved: bool) -> bool:
        """Give ``seq`` a row, the cached blocks and fresh ones for all its tokens; all or nothing.

        ``reserved``: the fresh blocks stay RESERVED, for KV that arrives from outside; else they
        are IN_USE.
        """
        if self.table.num_free == 0 or not self._take(seq, cached, seq.length, reserved):
            return False
        seq.cached_tokens = len(cached) * self.table.block_size
        seq.row = self.table.lend(seq.key, seq.spec)
        self.table.set_blocks(seq.row, seq.blocks)
        self.table.computed[seq.row] = seq.cached_tokens
        self.by_row[seq.row] = seq
        return True

    def is_untouched(self, seq: WorkerSequence) -> bool:
        """Whether nothing of its tokens was computed here, nor are its blocks being sent."""
        if seq.sending or seq.sent is not None:
            return False
        return bool(self.table.computed[seq.row] == seq.cached_tokens)

    def match_again(self, seq: WorkerSequence) -> None:
        """Trade blocks that an untouched sequence was to fill for those that are findable by now.
        Its last position stays to be computed.
        """
        have, size = seq.published, self.table.block_size
        found = self.pool.match(seq.hashes[have : (seq.length - 1) // size])
        end = have + len(found)
        if end * size <= seq.cached_tokens:
            return
        self.pool.acquire(found)
        self.pool.release(seq.blocks[have:end])
        seq.blocks[have:end] = found
        seq.published = end
        seq.cached_tokens = end * size
        self.table.set_blocks(seq.row, seq.blocks)
        self.table.computed[seq.row] = seq.cached_tokens

    def let_go(self, seq: WorkerSequence, fence: Hashable | None) -> None:
        """Take all blocks from a live sequence, which keeps its row and what is computed."""
        self.pool.release(seq.blocks, fence)
        seq.blocks = []
        self.table.set_blocks(seq.row, seq.blocks)

    def hold_again(self, seq: WorkerSequence, cached: Sequence[BlockId]) -> bool:
        """After ``let_go``: the cached blocks, and fresh ones for all that is known of it; all or
        nothing.
        """
        if not self._take(seq, cached, int(self.table.length[seq.row]), reserved=False):
            return False
        self.table.set_blocks(seq.row, seq.blocks)
        return True

    def held_rows(self) -> Rows:
        """Rows of the sequences that hold blocks."""
        held: Rows = self.table.num_blocks.nonzero()[0]
        return held

    def fill_reserved(self, seq: WorkerSequence) -> None:
        """All KV of a reserved sequence is here and verified, or will be computed here."""
        self.pool.commit(seq.blocks[seq.published :])

    def grow(self, rows: Sequence[int]) -> bool:
        """One more block for the next token of each row, or none at all and False."""
        fresh = self.pool.allocate(len(rows))
        if fresh is None:
            return False
        for row, block in zip(rows, fresh, strict=True):
            self.by_row[row].blocks.append(block)
        self.table.add_blocks(np.asarray(rows, np.int64), fresh)
        return True

    def publish(self, seq: WorkerSequence, num_tokens: int) -> None:
        """Make the full blocks among the first ``num_tokens`` computed tokens findable."""
        self.publish_all([seq], [num_tokens])

    def publish_all(self, seqs: Sequence[WorkerSequence], num_tokens: Sequence[int]) -> None:
        """The same for several sequences: a step fills blocks of many."""
        table, size, root = self.table, self.table.block_size, self.root
        blocks: list[BlockId] = []
        hashes: list[BlockHash] = []
        parents: list[BlockHash] = []
        for seq, end in zip(seqs, num_tokens, strict=True):
            known = seq.hashes
            for index in range(seq.published, end // size):
                parent = known[index - 1] if index else root
                if index == len(known):
                    known.append(block_hash(parent, table.bytes_of_block(seq.row, index)))
                blocks.append(seq.blocks[index])
                hashes.append(known[index])
                parents.append(parent)
            seq.published = max(seq.published, end // size)
        self.pool.publish_all(blocks, hashes, parents)

    def _take(
        self, seq: WorkerSequence, cached: Sequence[BlockId], num_tokens: int, reserved: bool
    ) -> bool:
        self.pool.acquire(cached)
        take = self.pool.reserve if reserved else self.pool.allocate
        fresh = take(self.blocks_for(num_tokens) - len(cached))
        if fresh is None:
            self.pool.release(cached)
            return False
        seq.blocks = [*cached, *fresh]
        seq.published = len(cached)
        return True

    def close(self, seq: WorkerSequence, fence: AttemptKey | None = None) -> None:
        """End ``seq`` and give back its row and blocks; under ``fence``, only when that is
        lifted.
        """
        seq.enter(State.CLOSED)
        if self._live.get((seq.key.router, seq.key.request)) is seq:
            del self._live[seq.key.router, seq.key.request]
        if seq.row < 0:
            return
        del self.by_row[seq.row]
        self.table.give_back(seq.row)
        self.pool.release(seq.blocks, fence)

    def renew(self, router: Incarnation, renewal: pb.Renew) -> list[WorkerSequence]:
        """Extend the leases of the attempts that their router still wants; which they are."""
        until = self.clock() + self.lease_s
        renewed = []
        for key in renewal.keys:
            seq = self.get(AttemptKey(router, key.request, key.attempt))  # type: ignore[arg-type]
            if seq is not None:
                seq.ends_s = min(seq.deadline_s, until)
                renewed.append(seq)
        return renewed

    def expired(self) -> list[WorkerSequence]:
        now = self.clock()
        if now <= self._first_end_s:
            return []
        # Renewal only ever moves an end back, so that what holds now is a bound from here on.
        self._first_end_s = min((s.ends_s for s in self._live.values()), default=math.inf)
        return [s for s in self._live.values() if now > s.ends_s]
