"""The receiver's leases: who may write where, until when. One lock, no I/O, no torch, no waiting.

The states are those of ``states``, and this table alone moves its leases through them. One slab of
a lease is scattered at a time: a slab that comes meanwhile by another link waits there, so that a
damaged late write never follows a verified one. A lease belongs to the life of the worker that
offers for it first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.core.span import Span
from kvferry.kv_transfer.counters import Counters, Tally
from kvferry.kv_transfer.ended import EndedLeases
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveClosed,
    ReceiveEvent,
    ReceiveJob,
)
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.lease import Lease
from kvferry.kv_transfer.messages import Offer, SlabHeader
from kvferry.kv_transfer.news import Changing, News
from kvferry.kv_transfer.states import Event, State, advance
from kvferry.kv_transfer.verdicts import Answer, Outcome, Source, Verdict


class LeaseTable:
    """All leases of one receiver's rank.

    Safe to call from any thread; ``on_event`` is called outside the lock.
    """

    def __init__(
        self,
        layout: KvLayout,
        rank: int,
        on_event: Callable[[ReceiveEvent], None],
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._on_event = on_event
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[LeaseId, Lease] = {}
        self._ended = EndedLeases()
        self.counters = Counters()

    def expect(self, job: ReceiveJob) -> None:
        """Register a live lease. Raises ValueError for a lease id that is already live, KeyError
        for an unknown element type.
        """
        lease = Lease.of(job, self._layout, self._rank)
        with self._changing() as news:
            if job.lease in self._leases:
                raise ValueError(f"lease {job.lease} is live")
            self._leases[job.lease] = lease
            if lease.coverage.complete:
                self._end(lease, Event.COMPLETE, lease.done(self._clock()), news)

    def state(self, lease_id: LeaseId) -> State | None:
        """None for a lease that is not known, or not any more."""
        with self._lock:
            lease = self._leases.get(lease_id)
            return self._ended.state(lease_id) if lease is None else lease.state

    def renew(self, lease_id: LeaseId, deadline_s: float) -> None:
        """Move a lease's deadline. Nothing happens to one that has ended."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is not None:
                lease.state = advance(lease.state, Event.RENEW)
                lease.deadline_s = deadline_s

    def release(self, lease_id: LeaseId) -> None:
        """End a lease. Idempotent, legal in any state."""
        with self._changing() as news:
            lease = self._leases.get(lease_id)
            if lease is not None:
                self._end(lease, Event.CLOSE, ReceiveClosed(lease.job.key, lease_id), news)

    def abort(self, source: Source, key: AttemptKey, lease_id: LeaseId, detail: str) -> None:
        """End a lease on its sender's word; another attempt's or peer's word counts for nothing."""
        with self._changing() as news:
            if self._refusal(source, key, lease_id) is None:
                lease = self._leases[lease_id]
                lease.watchers.pop(source.wake, None)
                self._end(lease, Event.FAIL, lease.failed(Reason.ABORTED, detail), news)

    def stuck(self, header: SlabHeader) -> Verdict:
        """A slab has waited for another one's scatter for longer than a transfer may stand still:
        its lease fails.
        """
        with self._changing() as news:
            lease = self._leases.get(LeaseId(header.lease))
            if lease is not None and lease.job.key == header.key:
                failed = lease.failed(Reason.TIMEOUT, "a scatter is stuck")
                self._end(lease, Event.FAIL, failed, news)
            return self._count(Verdict(Answer.ABORT, Reason.TIMEOUT, "a scatter is stuck"))

    def expire(self) -> None:
        """End the leases whose deadline has passed.

        The receiver's own clock calls this, whatever the traffic.
        """
        with self._changing() as news:
            now = self._clock()
            for lease in [lease for lease in self._leases.values() if lease.deadline_s <= now]:
                self._end(lease, Event.FAIL, lease.failed(Reason.DEADLINE), news)

    def close(self) -> None:
        """End all leases."""
        with self._changing() as news:
            for lease in list(self._leases.values()):
                self._end(lease, Event.FAIL, lease.failed(Reason.CLOSED), news)

    def offered(self, source: Source, offer: Offer) -> Verdict:
        """May slabs for this lease be granted? ACK says yes."""
        lease_id = LeaseId(offer.lease)
        with self._changing() as news:
            verdict = self._refusal(source, offer.key, lease_id)
            if verdict is not None:
                return self._count(verdict)
            lease = self._leases[lease_id]
            fault = lease.offer_fault(source.rank, offer)
            if fault is not None:
                return self._mismatch(lease, fault, news)
            lease.state = advance(lease.state, Event.OFFER)
            lease.peer = source.peer
            lease.account.transport = source.transport
            lease.watchers[source.wake] = None
            if lease.offered_s is None:
                lease.offered_s = self._clock()
            return Verdict(Answer.ACK)

    def unwatch(self, source: Source) -> None:
        """A link is closed: it is not to be woken any more."""
        with self._lock:
            for lease in self._leases.values():
                lease.watchers.pop(source.wake, None)
                lease.waiting.pop(source.wake, None)

    def refusal(self, source: Source, key: AttemptKey, lease_id: LeaseId) -> Verdict | None:
        """The answer to whoever names a lease that does not take slabs; None when it does."""
        with self._lock:
            return self._refusal(source, key, lease_id)

    def gap(self, source: Source, header: SlabHeader) -> Span | None:
        """Indices of headers that must have been lost on the way, since this one came before."""
        with self._lock:
            if self._refusal(source, header.key, LeaseId(header.lease)) is not None:
                return None
            gap = self._leases[LeaseId(header.lease)].gap(source.rank, header.index)
        if gap is not None:
            self.counters.tally(Tally.GAP)
        return gap

    def claim(self, source: Source, header: SlabHeader) -> Verdict:
        """Ask to scatter a slab; SCATTER must be followed by ``settle``."""
        with self._changing() as news:
            verdict = self._refusal(source, header.key, LeaseId(header.lease))
            if verdict is not None:
                return self._count(verdict)
            lease = self._leases[LeaseId(header.lease)]
            if lease.state is State.COPYING:
                lease.waiting[source.wake] = None
                return Verdict(Answer.WAIT)
            if lease.has(source.rank, header):
                return self._count(Verdict(Answer.ACK, Reason.DUPLICATE))
            fault = lease.fault(header)
            if fault is not None:
                return self._mismatch(lease, fault, news)
            lease.state = advance(lease.state, Event.COPY)
            return Verdict(Answer.SCATTER, job=lease.job)

    def recall(self, source: Source, header: SlabHeader) -> Verdict | None:
        """What to answer to a slab whose memory has another use by now.

        ACK or COMPLETE when it arrived before and the sender missed that; None: nothing.
        """
        with self._lock:
            verdict = self._refusal(source, header.key, LeaseId(header.lease))
            if verdict is None and self._leases[LeaseId(header.lease)].has(source.rank, header):
                verdict = Verdict(Answer.ACK, Reason.DUPLICATE)
            if verdict is None or verdict.answer is Answer.ABORT:
                self.counters.drop(Reason.FOREIGN)
                return None
            return self._count(verdict)

    def settle(
        self, source: Source, header: SlabHeader, outcome: Outcome, busy_s: float
    ) -> Verdict:
        """Report a claimed slab's scatter, which has returned."""
        with self._changing() as news:
            lease = self._leases[LeaseId(header.lease)]
            if not self._copied(lease, news):
                return self._count(Verdict(Answer.ABORT, Reason.ENDED))
            return self._settled(lease, source, header, outcome, busy_s, news)

    def _settled(
        self,
        lease: Lease,
        source: Source,
        header: SlabHeader,
        outcome: Outcome,
        busy_s: float,
        news: News,
    ) -> Verdict:
        """What a scatter of a live lease brought."""
        lease.account.nbytes += header.nbytes
        lease.account.busy_s += busy_s
        verdict = self._count(lease.judge(source.rank, header, outcome))
        if verdict.answer is Answer.RESEND:
            self.counters.tally(Tally.RESEND)
        if verdict.answer is Answer.ABORT and verdict.reason is not None:
            self._end(lease, Event.FAIL, lease.failed(verdict.reason, verdict.detail), news)
        elif verdict.is_last:
            # Its last Ack says it all; other links of the lease are told by a Complete.
            lease.watchers.pop(source.wake, None)
            self._end(lease, Event.COMPLETE, lease.done(self._clock()), news)
        return verdict

    def claim_filling(self, source: Source, header: SlabHeader) -> ReceiveJob | None:
        """Ask to scatter a slab that is still being filled; None: not now, whatever the reason.
        Otherwise ``settle_filling`` must follow.
        """
        with self._lock:
            if self._refusal(source, header.key, LeaseId(header.lease)) is not None:
                return None
            lease = self._leases[LeaseId(header.lease)]
            if lease.state is State.COPYING or lease.has(source.rank, header):
                return None
            if lease.fault(header) is not None:
                return None
            lease.state = advance(lease.state, Event.COPY)
            return lease.job

    def settle_filling(self, header: SlabHeader) -> int:
        """The scatter has returned. How many there were of its lease."""
        with self._changing() as news:
            lease = self._leases[LeaseId(header.lease)]
            self._copied(lease, news)
            return lease.num_scatters

    def settle_sealed(self, source: Source, header: SlabHeader, busy_s: float) -> Verdict:
        """Report a slab that was claimed while it was filled, and is verified already."""
        verdict = self.settle(source, header, Outcome.VERIFIED, busy_s)
        if verdict.answer is Answer.ACK:
            self.counters.tally(Tally.FOLLOWED)
        return verdict

    def settle_followed(
        self, source: Source, header: SlabHeader, num_scatters: int, busy_s: float
    ) -> Verdict | None:
        """Report a slab that was claimed while it was filled, and verified since. None: the lease
        has ended, another scatter runs, or ``num_scatters`` are not all.
        """
        with self._changing() as news:
            if self._refusal(source, header.key, LeaseId(header.lease)) is not None:
                return None
            lease = self._leases[LeaseId(header.lease)]
            if lease.state is State.COPYING or lease.num_scatters != num_scatters:
                return None
            # What was claimed cannot overlap what came since: nothing did.
            lease.num_scatters += 1
            self.counters.tally(Tally.FOLLOWED)
            return self._settled(lease, source, header, Outcome.VERIFIED, busy_s, news)

    def _copied(self, lease: Lease, news: News) -> bool:
        """A scatter has returned. Whether the lease lives on."""
        lease.num_scatters += 1
        news += lease.waiting
        lease.waiting.clear()
        lease.state = advance(lease.state, Event.COPIED)
        if lease.state.is_ended:
            self._bury(lease, news)
            return False
        return True

    def _mismatch(self, lease: Lease, fault: str, news: News) -> Verdict:
        self._end(lease, Event.FAIL, lease.failed(Reason.MISMATCH, fault), news)
        return self._count(Verdict(Answer.ABORT, Reason.MISMATCH, fault))

    def _refusal(self, source: Source, key: AttemptKey, lease_id: LeaseId) -> Verdict | None:
        lease = self._leases.get(lease_id)
        if lease is None:
            return self._ended.refusal(key, lease_id)
        return lease.refusal(source.peer, key)

    def _count(self, verdict: Verdict) -> Verdict:
        if verdict.reason is not None:
            self.counters.drop(verdict.reason)
        return verdict

    def _end(self, lease: Lease, event: Event, ending: ReceiveEvent, news: News) -> None:
        """The first ending counts, and waits for a scatter that runs."""
        lease.ending = lease.ending or ending
        lease.state = advance(lease.state, event)
        if lease.state.is_ended:
            self._bury(lease, news)

    def _bury(self, lease: Lease, news: News) -> None:
        assert lease.ending is not None, lease.state
        del self._leases[lease.job.lease]
        self._ended.remember(lease.job.lease, lease.job.key, lease.state)
        news.append(partial(self._on_event, lease.ending))
        news += lease.watchers

    def _changing(self) -> Changing:
        return Changing(self._lock)
