"""The receiver's leases: who may write where, until when. One lock, no I/O, no torch.

    state       event                                         next        terminal event
    LIVE        a slab claims it                              SCATTERING
    SCATTERING  slab verified, damaged or stale               LIVE
    LIVE        all slabs verified                            DONE        ReceiveDone
    LIVE        release                                       CLOSED      ReceiveClosed
    LIVE        deadline, abort by the peer, damaged twice,   FAILED      ReceiveFailed
                block given away, shutdown
    SCATTERING  any of the three endings above                (the same, after the scatter)
    DONE, CLOSED, FAILED  anything                            unchanged

One slab of a lease is scattered at a time: a second link of the same sender waits for the first
one's scatter, so that a damaged late write never follows a verified one. Ended leases are
remembered, the last ENDED_KEPT of them, to answer latecomers.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.kernels.kv_pack.tiles import num_tiles
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveJob,
)
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.messages import SlabHeader
from kvferry.kv_transfer.plan import Coverage, SlabMove
from kvferry.kv_transfer.verdicts import Answer, Outcome, Verdict

ENDED_KEPT = 4096


@dataclass(slots=True)
class _Lease:
    job: ReceiveJob
    coverage: Coverage
    deadline_s: float
    offered_s: float | None = None
    """When its sender first stood ready; what came before is the prompt's computation."""
    scattering: bool = False
    ending: ReceiveEvent | None = None
    """Decided, but held back while a scatter runs."""
    damaged: set[int] = field(default_factory=set)
    """Slabs that came damaged once."""
    nbytes: int = 0
    busy_s: float = 0.0


class LeaseTable:
    """All leases of one receiver.

    Safe to call from any thread; ``on_event`` is called outside the lock.
    """

    def __init__(
        self,
        layout: KvLayout,
        on_event: Callable[[ReceiveEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._on_event = on_event
        self._clock = clock
        self._changed = threading.Condition()
        self._leases: dict[LeaseId, _Lease] = {}
        self._ended: OrderedDict[LeaseId, ReceiveEvent] = OrderedDict()
        self.counters: Counter[Reason] = Counter()
        """Dropped offers and slabs by reason."""

    def expect(self, job: ReceiveJob) -> None:
        """Register a live lease. Raises ValueError for a lease id that is already live."""
        with self._changed:
            if job.lease in self._leases:
                raise ValueError(f"lease {job.lease} is live")
            self._ended.pop(job.lease, None)
            coverage = Coverage(self._layout, job.tokens)
            lease = _Lease(job, coverage, job.deadline_s)
            self._leases[job.lease] = lease
            event = self._end_if_complete(lease)
        self._emit(event)

    def renew(self, lease_id: LeaseId, deadline_s: float) -> None:
        """Move a live lease's deadline. Nothing happens to one that has ended."""
        with self._changed:
            if lease_id in self._leases:
                self._leases[lease_id].deadline_s = deadline_s

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Idempotent, legal in any state."""
        with self._changed:
            lease = self._leases.get(lease_id)
            event = None
            if lease is not None:
                event = self._end(lease, ReceiveClosed(lease.job.key, lease_id))
        self._emit(event)

    def fail(self, key: AttemptKey, lease_id: LeaseId, reason: Reason, detail: str) -> None:
        """End a lease on its sender's word; another attempt's word counts for nothing."""
        with self._changed:
            lease, event = self._leases.get(lease_id), None
            if lease is not None and lease.job.key == key:
                event = self._end(lease, _failed(lease, reason, detail))
        self._emit(event)

    def expire(self) -> None:
        """End the leases whose deadline has passed.

        The receiver's own clock calls this, whatever the traffic.
        """
        with self._changed:
            now = self._clock()
            late = [lease for lease in self._leases.values() if lease.deadline_s <= now]
            events = [self._end(lease, _failed(lease, Reason.DEADLINE)) for lease in late]
        for event in events:
            self._emit(event)

    def close(self, timeout_s: float) -> bool:
        """End all leases; whether every scatter returned within the time."""
        with self._changed:
            leases = list(self._leases.values())
            events = [self._end(lease, _failed(lease, Reason.CLOSED)) for lease in leases]
        for event in events:
            self._emit(event)
        with self._changed:
            return self._changed.wait_for(lambda: not self._leases, timeout_s)

    def offered(self, key: AttemptKey, lease_id: LeaseId, nbytes: int | None = None) -> Verdict:
        """May slabs for this lease be granted? ACK says yes. ``nbytes``: the whole transfer."""
        with self._changed:
            verdict = self._refusal(key, lease_id)
            if verdict is not None:
                return self._count(verdict)
            lease = self._leases[lease_id]
            expected = lease.coverage.expected_nbytes
            if nbytes is None or nbytes == expected:
                lease.offered_s = lease.offered_s or self._clock()
                return Verdict(Answer.ACK)
            fault = f"{nbytes} bytes offered, {expected} expected"
            event = self._end(lease, _failed(lease, Reason.MISMATCH, fault))
            verdict = self._count(Verdict(Answer.ABORT, Reason.MISMATCH, fault))
        self._emit(event)
        return verdict

    def is_live(self, key: AttemptKey, lease_id: LeaseId) -> bool:
        with self._changed:
            return self._refusal(key, lease_id) is None

    def claim(self, header: SlabHeader, timeout_s: float) -> Verdict:
        """Ask to scatter a slab; SCATTER must be followed by ``settle``.

        Waits while another slab of the lease is scattered, ``timeout_s`` at most.
        """
        lease_id = LeaseId(header.lease)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_scattering(lease_id), timeout_s)
            verdict = self._refusal(header.key, lease_id)
            if verdict is not None:
                return self._count(verdict)
            lease = self._leases[lease_id]
            move = header.move
            if lease.scattering:
                return self._count(Verdict(Answer.ABORT, Reason.TIMEOUT, "scatter is stuck"))
            if lease.coverage.moves.get(move.index) == move:
                return self._count(Verdict(Answer.ACK, Reason.DUPLICATE))
            fault = lease.coverage.fault(move) or _mismatch(header, lease.job, self._layout)
            if fault is None:
                lease.scattering = True
                return Verdict(Answer.SCATTER, job=lease.job)
            event = self._end(lease, _failed(lease, Reason.MISMATCH, fault))
            verdict = self._count(Verdict(Answer.ABORT, Reason.MISMATCH, fault))
        self._emit(event)
        return verdict

    def recall(self, header: SlabHeader) -> Verdict | None:
        """What to answer to a slab whose memory has another use by now.

        ACK or COMPLETE when it arrived before and the sender missed that; None: nothing.
        """
        lease_id = LeaseId(header.lease)
        with self._changed:
            verdict = self._refusal(header.key, lease_id)
            if verdict is None:
                moves = self._leases[lease_id].coverage.moves
                if moves.get(header.index) == header.move:
                    verdict = Verdict(Answer.ACK, Reason.DUPLICATE)
            if verdict is None or verdict.answer is Answer.ABORT:
                self.counters[Reason.FOREIGN] += 1
                return None
            return self._count(verdict)

    def settle(self, header: SlabHeader, outcome: Outcome, busy_s: float) -> Verdict:
        """Report a claimed slab's scatter, which has returned."""
        with self._changed:
            lease = self._leases[LeaseId(header.lease)]
            lease.scattering = False
            self._changed.notify_all()
            lease.nbytes += header.nbytes
            lease.busy_s += busy_s
            event, lease.ending = lease.ending, None
            if event is not None:
                self._end(lease, event)
                verdict = self._count(Verdict(Answer.ABORT, Reason.ENDED))
            else:
                verdict = self._judge(lease, header.move, outcome)
                if verdict.answer is Answer.ABORT and verdict.reason is not None:
                    event = self._end(lease, _failed(lease, verdict.reason))
                else:
                    event = self._end_if_complete(lease)
        self._emit(event)
        return verdict

    def _judge(self, lease: _Lease, move: SlabMove, outcome: Outcome) -> Verdict:
        match outcome:
            case Outcome.VERIFIED:
                lease.coverage.add(move)
                return Verdict(Answer.ACK)
            case Outcome.STALE:
                return self._count(Verdict(Answer.ABORT, Reason.STALE))
            case Outcome.BROKEN:
                return self._count(Verdict(Answer.ABORT, Reason.INTERNAL))
            case Outcome.DAMAGED:
                again = move.index in lease.damaged
                lease.damaged.add(move.index)
                answer = Answer.ABORT if again else Answer.RESEND
                return self._count(Verdict(answer, Reason.DAMAGED))

    def _is_scattering(self, lease_id: LeaseId) -> bool:
        lease = self._leases.get(lease_id)
        return lease is not None and lease.scattering

    def _refusal(self, key: AttemptKey, lease_id: LeaseId) -> Verdict | None:
        """The answer to whoever names a lease that does not take slabs; None when it does."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            if lease.job.key != key:
                return Verdict(Answer.ABORT, Reason.STALE)
            return Verdict(Answer.ABORT, Reason.ENDED) if lease.ending is not None else None
        ended = self._ended.get(lease_id)
        if ended is None:
            return Verdict(Answer.ABORT, Reason.UNKNOWN)
        if isinstance(ended, ReceiveDone) and ended.key == key:
            return Verdict(Answer.COMPLETE, Reason.DUPLICATE)
        return Verdict(Answer.ABORT, Reason.ENDED if ended.key == key else Reason.STALE)

    def _count(self, verdict: Verdict) -> Verdict:
        if verdict.reason is not None:
            self.counters[verdict.reason] += 1
        return verdict

    def _end_if_complete(self, lease: _Lease) -> ReceiveEvent | None:
        if not lease.coverage.complete:
            return None
        now = self._clock()
        wall_s = now - (lease.offered_s or now)
        job = lease.job
        return self._end(lease, ReceiveDone(job.key, job.lease, lease.nbytes, lease.busy_s, wall_s))

    def _end(self, lease: _Lease, event: ReceiveEvent) -> ReceiveEvent | None:
        """The one transition into an end state. The event to deliver now, if any."""
        if lease.scattering:
            lease.ending = lease.ending or event
            return None
        del self._leases[lease.job.lease]
        self._ended[lease.job.lease] = event
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)
        self._changed.notify_all()
        return event

    def _emit(self, event: ReceiveEvent | None) -> None:
        if event is not None:
            self._on_event(event)


def _failed(lease: _Lease, reason: Reason, detail: str = "") -> ReceiveFailed:
    return ReceiveFailed(lease.job.key, lease.job.lease, reason, detail)


def _mismatch(header: SlabHeader, job: ReceiveJob, layout: KvLayout) -> str | None:
    if header.flavour != layout.flavour:
        return f"KV flavour is {header.flavour} on the sender, {layout.flavour} here"
    if header.chain_hash != job.chain_hash:
        return "content hash differs"
    if header.index >= header.count:
        return "slab number is not below the count"
    move = header.move
    row_token_bytes = move.heads.length * layout.head_bytes
    if len(header.digests) != num_tiles(
        2 * move.layers.length, move.tokens.length, row_token_bytes
    ):
        return "number of digests differs from the number of tiles"
    return None
