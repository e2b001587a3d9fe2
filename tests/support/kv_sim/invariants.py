"""What must hold at all times, and what when all is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_sim.causes import FAILED, LINK_LOST
from kv_sim.session import Session
from kv_sim.workers import DecodeSide, Worker
from kvferry.core.ids import AttemptKey
from kvferry.engine.sequences import WorkerSequence
from kvferry.kv_transfer.jobs import Reason, ReceiveEvent, ReceiveFailed, SendEvent, SendFailed

if TYPE_CHECKING:
    from kv_sim.world import World

RECLAIM_S = 1.0
"""After a deadline, blocks are back within so much time."""
WATCH_S = 0.25


class Invariants:
    """Watches all workers of a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ended: dict[tuple[str, Any], int] = {}
        """Terminal events per job of the KV plane."""
        self.events: list[SendEvent | ReceiveEvent] = []
        self._forgotten: set[tuple[str, AttemptKey]] = set()
        self._overdue_since: dict[tuple[str, Any], float] = {}

    def job(self, worker: Worker, key: Any) -> None:
        self.ended[worker.name, key] = 0

    def ending(self, worker: Worker, key: Any, event: SendEvent | ReceiveEvent) -> None:
        """A terminal event of the KV plane."""
        self.world.note("%s: %s", worker.name, event)
        self.events.append(event)
        if isinstance(event, SendFailed | ReceiveFailed) and not worker.dead:
            self._failed(worker, event)
        count = self.ended.get((worker.name, key))
        if count is None:
            self.world.violation(f"{worker.name}: {event} of a job that it never had")
        elif count:
            self.world.violation(f"{worker.name}: a second end, {event}")
        else:
            self.ended[worker.name, key] = 1

    def forget(self, worker: Worker, key: AttemptKey) -> None:
        """A defect is simulated: nobody ends this attempt."""
        self._forgotten.add((worker.name, key))

    def link_lost(self, name: str, error: Exception) -> None:
        self.world.note("%s is lost: %s", name, error)
        if not self.world.happened & LINK_LOST:
            self.world.violation(f"{name} is lost without a cause: {error}")

    def _failed(self, worker: Worker, event: SendFailed | ReceiveFailed) -> None:
        if event.reason not in FAILED or self.world.happened & FAILED[event.reason]:
            return
        if event.reason is Reason.DEADLINE:
            request = self.world.request(event.key)
            if request is None or request.deadline_s <= self.world.agenda.now:
                return
        self.world.violation(f"{worker.name}: fails without a cause: {event}")

    def after_turn(self, worker: Worker) -> None:
        counts = worker.pool.counts()
        if counts.total != worker.pool.num_blocks:
            self.world.violation(f"{worker.name}: {counts} are not {worker.pool.num_blocks} blocks")

    def heard(self, worker: Worker, kind: str) -> None:
        """What the ledger has admitted leaves room for what it counts as growth."""
        if kind != "granted" or not isinstance(worker, DecodeSide):
            return
        sequences = worker.sequences
        held = sequences.held_rows()
        if len(held) < 2:
            return
        table = sequences.table
        growth = worker.ledger.growth(
            table.length[held], table.max_length[held], table.guaranteed[held]
        )
        if worker.pool.num_free < growth:
            self.world.violation(
                f"{worker.name}: overcommitted, {growth} blocks of growth, "
                f"{worker.pool.num_free} free"
            )

    def watch(self) -> None:
        """Nothing outlives its deadline, and no fence its operation, by more than RECLAIM_S."""
        now = self.world.agenda.now
        overdue = set()
        for worker in self.world.live_workers():
            if worker.is_stalled:
                continue
            for seq in worker.sequences:
                if now > seq.ends_s or not self._is_wanted(seq):
                    overdue.add((worker.name, seq.key))
            overdue.update(
                (name, key)
                for (name, key), count in self.ended.items()
                if not count
                and name == worker.name
                and (name, key) not in self._forgotten
                and worker.pool.is_fenced(key)
            )
        since = self._overdue_since
        self._overdue_since = {thing: since.get(thing, now) for thing in overdue}
        for (name, key), start in self._overdue_since.items():
            if now - start > RECLAIM_S + WATCH_S:
                self.world.violation(f"{name}: {key} holds blocks {now - start:.2f} s too long")
        if not self.world.closing:
            self.world.agenda.after(WATCH_S, self.watch)

    def _is_wanted(self, seq: WorkerSequence) -> bool:
        """Whether its router still waits for it, or cannot say so any more."""
        session = seq.port
        assert isinstance(session, Session)
        if session.closed:
            return not session.worker_knows
        if self.world.agenda.now < session.held_until_s:
            return True
        return session.router.wants(session, seq.key.request, seq.key.attempt)

    def at_rest(self) -> str:
        """Why not all is given back yet; empty when it is."""
        for worker in self.world.live_workers():
            counts = worker.pool.counts()
            table = worker.sequences.table
            if len(worker.sequences):
                return f"{worker.name}: {[(s.key, s.state) for s in worker.sequences]}"
            if counts.reserved or counts.in_use or counts.fenced or worker.pool.num_fences:
                return f"{worker.name}: {counts}, {worker.pool.num_fences} fences"
            if table.num_free != table.max_rows:
                return f"{worker.name}: {table.max_rows - table.num_free} rows are taken"
            rest = worker.kv_at_rest()
            if rest:
                return f"{worker.name}: {rest}"
        dead = {worker.name for worker in self.world.all_workers if worker.dead}
        for (name, key), count in self.ended.items():
            if not count and name not in dead:
                return f"{name}: the job of {key} has not ended"
        for request in self.world.requests():
            if not request.outcome:
                return f"request {request.number} has not ended"
        return ""

    def held_blocks(self) -> int:
        counts = [worker.pool.counts() for worker in self.world.live_workers()]
        return sum(c.reserved + c.in_use + c.fenced for c in counts)

    def check_end(self) -> None:
        """All faults are over and all is given back."""
        for request in self.world.requests():
            if request.outcome == "done" and request.output != request.expected:
                self.world.wrong(f"request {request.number}: ended with {request.output}")
