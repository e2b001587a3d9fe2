"""One lease of a receiver: what it is for, what has arrived, what its senders announced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveJob,
)
from kvferry.kv_transfer.layout import KvLayout, head_nbytes
from kvferry.kv_transfer.messages import Offer, SlabHeader
from kvferry.kv_transfer.plan import Coverage
from kvferry.kv_transfer.states import State
from kvferry.kv_transfer.verdicts import Answer, Outcome, Verdict


@dataclass(slots=True)
class Lease:
    """All of it is guarded by the lock of its table, which alone changes ``state``."""

    job: ReceiveJob
    coverage: Coverage
    deadline_s: float
    state: State = State.WAITING
    ending: ReceiveEvent | None = None
    """Decided; delivered once the state is one of the ends."""
    peer: Incarnation | None = None
    """Who sends. Another life of that worker knows nothing of this attempt."""
    offered_s: float | None = None
    """When its sender first stood ready; what came before is the prompt's computation."""
    num_scatters: int = 0
    """That have returned, however they went."""
    account: Account = field(default_factory=Account)
    watchers: dict[Callable[[], None], None] = field(default_factory=dict)
    """Wake the links that have offered for it, in that order."""
    waiting: dict[Callable[[], None], None] = field(default_factory=dict)
    """Wake the links that hold a slab until the scatter returns, first come first."""
    _parts: dict[int, int] = field(default_factory=dict)
    """Bytes that each of the sender's ranks announced."""
    _next_index: dict[int, int] = field(default_factory=dict)
    """By the sender's rank: above all headers so far."""
    _damaged: set[tuple[int, int]] = field(default_factory=set)
    """(sender's rank, index) of slabs that came damaged once."""

    @classmethod
    def of(cls, job: ReceiveJob, layout: KvLayout, rank: int) -> Lease:
        """A lease of a rank's shard of a cache."""
        head_bytes = head_nbytes(layout.head_dim, job.wire)
        return cls(job, Coverage(layout.shard(rank), job.tokens, head_bytes), job.deadline_s)

    def refusal(self, peer: Incarnation, key: AttemptKey) -> Verdict | None:
        """The answer to an attempt that names it and whose slabs it does not take; None when it
        does.
        """
        if self.job.key != key:
            return Verdict(Answer.ABORT, Reason.STALE)
        if self.peer not in (None, peer):
            return Verdict(Answer.ABORT, Reason.STALE, "another life of the sender")
        return None if self.state.is_live else Verdict(Answer.ABORT, Reason.ENDED)

    def offer_fault(self, rank: int, offer: Offer) -> str | None:
        """Why an offer cannot be right, None when it can. Notes what it announces."""
        if self._parts.setdefault(rank, offer.nbytes) != offer.nbytes:
            return f"rank {rank} offered {self._parts[rank]} bytes before, {offer.nbytes} now"
        total, expected = sum(self._parts.values()), self.coverage.expected_nbytes
        if total > expected or (len(self._parts) >= offer.ranks and total != expected):
            return f"{total} bytes offered by {len(self._parts)} ranks, {expected} expected"
        return None

    def has(self, rank: int, header: SlabHeader) -> bool:
        """Whether this very slab has arrived."""
        known = self.coverage.moves.get((rank, header.index))
        return known is not None and known == header.move

    def fault(self, header: SlabHeader) -> str | None:
        """Why a slab cannot be part of it, None when it can."""
        if self.state is State.WAITING:
            return "a slab before its offer"
        if header.wire != self.job.wire:
            return f"KV comes as {header.wire}, expected as {self.job.wire}"
        if header.chain_hash != self.job.chain_hash:
            return "content hash differs"
        return self.coverage.fault(header.move)

    def gap(self, rank: int, index: int) -> Span | None:
        """The headers that must have been lost before this one; each is named once."""
        expected = self._next_index.get(rank, 0)
        self._next_index[rank] = max(expected, index + 1)
        return Span(expected, index) if index > expected else None

    def judge(self, rank: int, header: SlabHeader, outcome: Outcome) -> Verdict:
        """What to answer to a slab that was scattered, and counts from now on."""
        match outcome:
            case Outcome.VERIFIED:
                self.coverage.add(rank, header.move)
                return Verdict(Answer.ACK, is_last=self.coverage.complete)
            case Outcome.STALE:
                detail = "a block of the receiver was given away"
                return Verdict(Answer.ABORT, Reason.STALE, detail)
            case Outcome.BROKEN:
                return Verdict(Answer.ABORT, Reason.INTERNAL)
            case Outcome.DAMAGED:
                if (rank, header.index) in self._damaged:
                    return Verdict(Answer.ABORT, Reason.DAMAGED)
                self._damaged.add((rank, header.index))
                self.account.resends += 1
                return Verdict(Answer.RESEND, Reason.DAMAGED)

    def done(self, now: float) -> ReceiveDone:
        self.account.wall_s = 0.0 if self.offered_s is None else now - self.offered_s
        return ReceiveDone(self.job.key, self.job.lease, self.account)

    def failed(self, reason: Reason, detail: str = "") -> ReceiveFailed:
        return ReceiveFailed(self.job.key, self.job.lease, reason, detail)
