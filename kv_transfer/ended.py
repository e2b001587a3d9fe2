"""What a receiver remembers of leases that have ended, to answer latecomers."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.states import State
from kvferry.kv_transfer.verdicts import Answer, Verdict

ENDED_KEPT = 4096


class _Ended(NamedTuple):
    key: AttemptKey
    state: State


class EndedLeases:
    """The last ENDED_KEPT of them."""

    def __init__(self) -> None:
        self._ended: OrderedDict[LeaseId, _Ended] = OrderedDict()

    def remember(self, lease: LeaseId, key: AttemptKey, state: State) -> None:
        self._ended[lease] = _Ended(key, state)
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def state(self, lease: LeaseId) -> State | None:
        """None for a lease that is not remembered."""
        ended = self._ended.get(lease)
        return None if ended is None else ended.state

    def refusal(self, key: AttemptKey, lease: LeaseId) -> Verdict:
        """The answer to an attempt that names it."""
        ended = self._ended.get(lease)
        if ended is None:
            return Verdict(Answer.ABORT, Reason.UNKNOWN)
        if ended.key != key:
            return Verdict(Answer.ABORT, Reason.STALE)
        if ended.state is State.DONE:
            return Verdict(Answer.COMPLETE, Reason.DUPLICATE)
        return Verdict(Answer.ABORT, Reason.ENDED)
