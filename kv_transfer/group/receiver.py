"""The receivers of all ranks of a worker, as one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.group.endings import Endings
from kvferry.kv_transfer.group.orders import (
    Counts,
    Done,
    Expect,
    Expected,
    Failed,
    GivenUp,
    Release,
    Renew,
    decode_answer,
)
from kvferry.kv_transfer.group.ranks import Ranks
from kvferry.kv_transfer.jobs import (
    ReceiveClosed,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveJob,
)
from kvferry.kv_transfer.receiver import KvReceiver


class GroupReceiver:
    """Rank 0's receiver, and orders to the others'. A lease has one terminal event, after the last
    word of every rank; it is complete when all ranks have verified their part.
    """

    def __init__(
        self,
        make: Callable[[Callable[[ReceiveEvent], None]], KvReceiver],
        ranks: Ranks,
        on_event: Callable[[ReceiveEvent], None],
        others: Sequence[Sequence[str]] = (),
    ) -> None:
        """``make``: builds rank 0's own, given who hears its events. ``others``: where the ranks
        from 1 on receive.
        """
        self._ranks = ranks
        self._on_event = on_event
        self._endings: Endings[ReceiveEvent] = Endings(lambda event: event.lease)
        self._unready: dict[LeaseId, tuple[int, Callable[[], None]]] = {}
        self._counts: dict[int, Counts] = {}
        self._lock = threading.Lock()
        self.own = make(self._ended)
        self.endpoints: list[Sequence[str]] = [self.own.endpoints, *others]
        """Where each rank receives."""

    @property
    def counters(self) -> Counter[str]:
        """Offers and slabs dropped so far by all ranks, by reason."""
        own = {str(reason): count for reason, count in self.own.counters.items()}
        return sum((Counter(c.dropped) for c in self._others_counts()), Counter(own))

    @property
    def tallies(self) -> Counter[str]:
        """What else happened so far on all ranks' links, by kind."""
        own = {str(what): count for what, count in self.own.tallies.items()}
        return sum((Counter(c.tallies) for c in self._others_counts()), Counter(own))

    def expect(self, job: ReceiveJob, ready: Callable[[], None]) -> None:
        """As ``KvReceiver.expect``. ``ready`` is called once all ranks would take slabs: at once
        where there is one, else on another thread. Raises RankLost.
        """
        with self._lock:
            self._endings.expect(job.lease, 1 + self._ranks.count)
            if self._ranks.count:
                self._unready[job.lease] = self._ranks.count, ready
        self._ranks.tell(Expect(job))
        self.own.expect(job)
        if not self._ranks.count:
            ready()

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        """As ``KvReceiver.renew``."""
        self._ranks.tell_if_there(Renew(lease, deadline_s))
        self.own.renew(lease, deadline_s)

    def release(self, lease: LeaseId) -> None:
        """As ``KvReceiver.release``; from any thread."""
        self._ranks.tell_if_there(Release(lease))
        self.own.release(lease)

    def answered(self, rank: int, payload: bytes) -> None:
        """What another rank says. Raises msgspec.DecodeError."""
        match decode_answer(payload):
            case Expected(lease):
                self._is_expected(lease)
            case Done(key, account, lease):
                self._ended(ReceiveDone(key, lease, account))
            case Failed(key, reason, detail, lease):
                self._ended(ReceiveFailed(key, lease, reason, detail))
            case GivenUp(key, lease):
                self._ended(ReceiveClosed(key, lease))
            case Counts() as counts:
                with self._lock:
                    self._counts[rank] = counts

    def close(self) -> None:
        """As ``KvReceiver.close``."""
        self.own.close()

    def _others_counts(self) -> list[Counts]:
        with self._lock:
            return list(self._counts.values())

    def _is_expected(self, lease: LeaseId) -> None:
        with self._lock:
            left, ready = self._unready[lease]
            if left > 1:
                self._unready[lease] = left - 1, ready
                return
            del self._unready[lease]
        ready()

    def _ended(self, event: ReceiveEvent) -> None:
        with self._lock:
            word = self._endings.add(event)
        if word.is_first_bad:
            self.release(event.lease)
        if word.ended is not None:
            self._on_event(word.ended)
