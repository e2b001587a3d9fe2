"""The sender's transfers: one lock decides each one's end, whoever asks for it.

    state     event                                       next      terminal event
    QUEUED    its link offers it                          QUEUED
    QUEUED    a credit arrives, a pack begins             PACKING
    PACKING   the pack returns                            QUEUED
    QUEUED    all slabs acknowledged                      ENDED     SendDone
    QUEUED    abort                                       ENDED     SendAborted
    QUEUED    refusal, stale block, no progress, ...      ENDED     SendFailed
    PACKING   abort                                       (SendAborted, once the pack has returned)
    ENDED     anything                                    ENDED

Only the link's thread packs and fails a transfer; abort may come from any thread at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.jobs import (
    Reason,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.plan import SlabMove


class TransferState(Enum):
    QUEUED = auto()
    PACKING = auto()
    ENDED = auto()


@dataclass(slots=True)
class Transfer:
    """One job under way. Its link's thread owns all fields but ``state`` and ``ending``."""

    job: SendJob
    started_s: float
    progress_s: float
    """When something last moved."""
    moves: tuple[SlabMove, ...] = ()
    unsent: list[int] = field(default_factory=list)
    """Slabs without memory, last first."""
    held: dict[int, tuple[int, int]] = field(default_factory=dict)
    """grant -> (slab memory, slab index): filled and not yet acknowledged."""
    acked: set[int] = field(default_factory=set)
    retried: bool = False
    """Sent once more already since it last moved."""
    nbytes: int = 0
    busy_s: float = 0.0
    state: TransferState = TransferState.QUEUED
    ending: SendEvent | None = None
    """Decided; delivered once the state is ENDED."""

    @property
    def is_delivered(self) -> bool:
        return isinstance(self.ending, SendDone)

    def rewind(self) -> None:
        """Forget what was in flight: its link is gone."""
        self.held.clear()
        missing = [move.index for move in self.moves if move.index not in self.acked]
        self.unsent = missing[::-1]


class TransferTable:
    """All live transfers of a sender. ``on_event`` is called outside the lock."""

    def __init__(
        self,
        on_event: Callable[[SendEvent], None],
        clock: Callable[[], float],
        progress_timeout_s: float,
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._transfers: dict[AttemptKey, Transfer] = {}

    def add(self, job: SendJob) -> Transfer:
        """Raises ValueError when this attempt is being sent already."""
        now = self._clock()
        with self._lock:
            if job.key in self._transfers:
                raise ValueError(f"attempt {job.key} is being sent already")
            transfer = self._transfers[job.key] = Transfer(job, now, now)
        return transfer

    def abort(self, key: AttemptKey) -> None:
        """Legal in any state, idempotent."""
        with self._lock:
            transfer = self._transfers.get(key)
            event = None if transfer is None else self._end(transfer, SendAborted(key))
        self._emit(event)

    def fail(self, transfer: Transfer, reason: Reason, detail: str = "") -> None:
        with self._lock:
            event = self._end(transfer, SendFailed(transfer.job.key, reason, detail))
        self._emit(event)

    def succeed(self, transfer: Transfer) -> None:
        wall_s = self._clock() - transfer.started_s
        with self._lock:
            done = SendDone(transfer.job.key, transfer.nbytes, transfer.busy_s, wall_s)
            event = self._end(transfer, done)
        self._emit(event)

    def begin_pack(self, transfer: Transfer) -> bool:
        """Whether the pack may begin; if so ``finish_pack`` must follow."""
        with self._lock:
            if transfer.state is TransferState.ENDED:
                return False
            transfer.state = TransferState.PACKING
            return True

    def finish_pack(self, transfer: Transfer) -> bool:
        """The pack has returned. Whether the transfer goes on."""
        with self._lock:
            transfer.state = TransferState.QUEUED
            event: SendEvent | None = None
            if transfer.ending is not None:
                event = self._end(transfer, transfer.ending)
        self._emit(event)
        return event is None

    def moved(self, transfer: Transfer, retried: bool = False) -> None:
        """A transfer moved, or (``retried``) is sent once more because it does not."""
        transfer.progress_s = self._clock()
        transfer.retried = retried

    def overdue_in_s(self, transfer: Transfer) -> float:
        """Seconds until a transfer that does not move is overdue."""
        return transfer.progress_s + self._progress_timeout_s - self._clock()

    def is_overdue(self, transfer: Transfer) -> bool:
        return self.overdue_in_s(transfer) <= 0

    def _end(self, transfer: Transfer, event: SendEvent) -> SendEvent | None:
        """The one transition into ENDED. The event to deliver now, if any."""
        match transfer.state:
            case TransferState.QUEUED:
                transfer.state = TransferState.ENDED
                transfer.ending = event
                del self._transfers[transfer.job.key]
                return event
            case TransferState.PACKING:
                transfer.ending = transfer.ending or event
        return None

    def _emit(self, event: SendEvent | None) -> None:
        if event is not None:
            self._on_event(event)
