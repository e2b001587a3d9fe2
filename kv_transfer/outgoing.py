"""The sender's transfers: what of each is computed, cut, in memory of the receiver's, acknowledged.

One lock decides each one's end, whoever asks for it (``states``). Only the link's thread packs
and fails a transfer; ``computed`` and ``abort`` may come from any thread at any time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import Shard
from kvferry.kv_transfer.plan import Cutter, SlabMove, best_slab_bytes
from kvferry.kv_transfer.states import Event, State, advance


class Owed(NamedTuple):
    """What this rank sends of a job, and when."""

    parts: tuple[Shard, ...]
    head_bytes: int
    """Of the wire's type, scale included."""
    least_bytes: float
    """Slabs wait until so much is computed, or all is."""
    num_ranks: int = 1
    """Ranks of this sender that have a part of the lease."""


class Progress(NamedTuple):
    """What of a prompt is computed: see ``plan.Cutter``."""

    layers_end: int
    tokens_end: int
    after: object
    """The device's event that the blocks' contents wait for."""


class Ready(NamedTuple):
    """A slab that can be packed."""

    move: SlabMove
    after: object


@dataclass(slots=True)
class Transfer:
    """One job under way. Its link's thread owns all fields but those of ``report`` and ``state``,
    ``ending``.
    """

    job: SendJob
    owed: Owed
    progress_s: float
    """When something last moved."""
    progress: Progress | None = None
    first_report: tuple[Progress, float] | None = None
    computed_s: float | None = None
    """When all was computed."""
    is_first_token_known: bool = False
    wake: Callable[[], None] = lambda: None
    """Make the link look at ``progress``."""
    slabs: list[Ready] = field(default_factory=list)
    """All that are cut; the position is the index."""
    unsent: deque[int] = field(default_factory=deque)
    """Slabs without memory."""
    acked: set[int] = field(default_factory=set)
    acked_nbytes: int = 0
    tail_nbytes: int = 0
    """What was not acknowledged when all was computed."""
    overlapped_s: float = 0.0
    """Packing while the prompt was computed."""
    retried: bool = False
    """Sent once more already since it last moved."""
    account: Account = field(default_factory=Account)
    ready_s: float | None = None
    """When the first slab stood ready."""
    starved_s: float | None = None
    """Since when slabs stand ready and none has memory."""
    state: State = State.WAITING
    ending: SendEvent | None = None
    """Decided; delivered once the state is one of the end."""
    followed_from: int | None = None
    """Bytes from which on its slabs are such as a receiver scatters while they are filled."""
    nbytes: int = field(init=False)
    """All that is owed, computed or not."""
    _cutters: tuple[Cutter, ...] = ()
    _seen: Progress | None = None

    def __post_init__(self) -> None:
        owed = self.owed
        token_bytes = sum(part.token_bytes(owed.head_bytes) for part in owed.parts)
        self.nbytes = self.job.tokens.length * token_bytes

    @property
    def is_live(self) -> bool:
        return self.state.is_live

    @property
    def has_progressed(self) -> bool:
        """Whether more was reported since the last cut."""
        return self.progress is not self._seen

    @property
    def is_whole(self) -> bool:
        """Whether all is cut."""
        return bool(self._cutters) and all(cutter.complete for cutter in self._cutters)

    @property
    def is_acked(self) -> bool:
        return self.is_whole and len(self.acked) == len(self.slabs)

    @property
    def is_waiting(self) -> bool:
        """Whether something is cut that the receiver has not acknowledged."""
        return len(self.acked) < len(self.slabs)

    def report(self, progress: Progress, now: float) -> bool:
        """More is computed. Whether the link should look at it. The step loop's thread."""
        end = max(part.layers.end for part in self.owed.parts) if self.owed.parts else 0
        whole = progress.layers_end >= end and progress.tokens_end >= self.job.tokens.end
        if whole and self.computed_s is None:
            self.computed_s = now
        if self.first_report is None and progress.tokens_end > self.job.tokens.begin:
            self.first_report = (progress, now)
        self.progress = progress
        return whole or self.owed.least_bytes < self.nbytes

    def cut(
        self, slab_bytes: int, now: float, followed_from: Callable[[], int | None] = lambda: None
    ) -> bool:
        """Cut what became ready since the last call; whether there was any.

        ``followed_from``: from how many bytes on the receiver scatters slabs while they are filled.
        Raises TransferFailed for a slab too small for one token of one layer.
        """
        progress = self.progress
        if progress is None or not self.has_progressed:
            return False
        self._seen = progress
        if self.computed_s is not None and not self.tail_nbytes:
            self.tail_nbytes = self.nbytes - self.acked_nbytes
        if not self._cutters:
            owed, tokens = self.owed, self.job.tokens
            least_bytes = owed.least_bytes / len(owed.parts)
            self.followed_from = followed_from()
            is_followed = self.followed_from is not None
            slab_bytes = best_slab_bytes(self.nbytes, slab_bytes, is_followed)
            self._cutters = tuple(
                Cutter(part, tokens, owed.head_bytes, slab_bytes, least_bytes)
                for part in owed.parts
            )
        before = len(self.slabs)
        for cutter in self._cutters:
            cutter.num_cut = len(self.slabs)
            for move in cutter.advance(progress.layers_end, progress.tokens_end):
                self.unsent.append(move.index)
                self.slabs.append(Ready(move, progress.after))
        if len(self.slabs) == before:
            return False
        if self.ready_s is None:
            self.ready_s = now
        return True

    def ack(self, index: int) -> None:
        """The receiver has verified a slab."""
        if index not in self.acked:
            self.acked.add(index)
            self.acked_nbytes += self.slabs[index].move.nbytes

    def rewind(self) -> None:
        """Forget what was in flight: its link is gone."""
        self.unsent = deque(index for index in range(len(self.slabs)) if index not in self.acked)

    def count_starving(self, now: float) -> None:
        """Add up the time in which slabs stand ready and none has memory granted for it."""
        if self.starved_s is not None:
            self.account.credit_s += now - self.starved_s
        self.starved_s = now if self.unsent else None


class TransferTable:
    """All live transfers of a sender. ``on_event`` is called outside the lock."""

    def __init__(
        self,
        on_event: Callable[[SendEvent], None],
        clock: Callable[[], float],
        progress_timeout_s: float,
        on_sent: Callable[[Transfer], None] = lambda transfer: None,
    ) -> None:
        """``on_sent``: sees each transfer that succeeded, on its link's thread."""
        self._on_event = on_event
        self._on_sent = on_sent
        self._clock = clock
        self._progress_timeout_s = progress_timeout_s
        self._lock = threading.Lock()
        self._transfers: dict[AttemptKey, dict[int, Transfer]] = {}
        """By attempt and rank of the receiver."""

    def add(self, job: SendJob, owed: Owed) -> Transfer:
        """Raises ValueError when this attempt is being sent to that rank already."""
        with self._lock:
            ranks = self._transfers.setdefault(job.key, {})
            if job.target_rank in ranks:
                raise ValueError(f"attempt {job.key} is being sent to {job.target_rank} already")
            transfer = ranks[job.target_rank] = Transfer(job, owed, self._clock())
        return transfer

    def of(self, key: AttemptKey) -> list[Transfer]:
        """The live transfers of an attempt, one per rank of the receiver."""
        with self._lock:
            return list(self._transfers.get(key, {}).values())

    def abort(self, key: AttemptKey) -> list[Transfer]:
        """Legal in any state, idempotent. Those that it ended or will end."""
        with self._lock:
            transfers = list(self._transfers.get(key, {}).values())
            ended = [self._end(transfer, Event.CLOSE, SendAborted(key)) for transfer in transfers]
        for event in ended:
            self._emit(event)
        return transfers

    def fail(self, transfer: Transfer, reason: Reason, detail: str = "") -> None:
        failed = SendFailed(transfer.job.key, reason, detail)
        with self._lock:
            event = self._end(transfer, Event.FAIL, failed)
        self._emit(event)

    def succeed(self, transfer: Transfer) -> None:
        """All is acknowledged."""
        now, account = self._clock(), transfer.account
        account.wall_s = now - (now if transfer.ready_s is None else transfer.ready_s)
        account.exposed_s = now - (now if transfer.computed_s is None else transfer.computed_s)
        self._on_sent(transfer)
        done = SendDone(transfer.job.key, account)
        with self._lock:
            event = self._end(transfer, Event.COMPLETE, done)
        self._emit(event)

    def offer(self, transfer: Transfer) -> bool:
        """The receiver is to be told that slabs stand ready. False when the transfer is over."""
        with self._lock:
            if transfer.is_live:
                transfer.state = advance(transfer.state, Event.OFFER)
            return transfer.is_live

    def lost(self, transfer: Transfer) -> None:
        """The link is gone; what was in flight is forgotten."""
        with self._lock:
            transfer.state = advance(transfer.state, Event.LOST)
        transfer.rewind()

    def begin_pack(self, transfer: Transfer) -> bool:
        """Whether the pack may begin; if so ``finish_pack`` must follow."""
        with self._lock:
            if transfer.is_live:
                transfer.state = advance(transfer.state, Event.COPY)
            return transfer.is_live

    def finish_pack(self, transfer: Transfer) -> bool:
        """The pack has returned. Whether the transfer goes on."""
        with self._lock:
            transfer.state = advance(transfer.state, Event.COPIED)
            event = self._forget(transfer) if transfer.state.is_ended else None
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

    def _end(self, transfer: Transfer, event: Event, ending: SendEvent) -> SendEvent | None:
        """What to deliver now, if anything."""
        if not transfer.is_live:
            return None
        transfer.ending = ending
        transfer.state = advance(transfer.state, event)
        return self._forget(transfer) if transfer.state.is_ended else None

    def _forget(self, transfer: Transfer) -> SendEvent | None:
        job = transfer.job
        ranks = self._transfers[job.key]
        del ranks[job.target_rank]
        if not ranks:
            del self._transfers[job.key]
        return transfer.ending

    def _emit(self, event: SendEvent | None) -> None:
        if event is not None:
            self._on_event(event)
