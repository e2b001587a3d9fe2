"""The step loop: the one thread on which everything a worker knows about its sequences changes.

    events in ─▶ clock ─▶ plan ─▶ run the step ─▶ commit ─▶ messages out

Where steps run on a device, one is launched and what needs none of its results is done while it
computes: what the step before has to say goes out, messages that touch no sequence of the step are
taken in, and the next step is planned as it will be if nothing but tokens comes of this one.
Whatever else came waits until the step is settled; so nothing that a running step names can end,
move or be given away under it.

Sessions, transfers and callers on other threads only ``post`` events. What differs between the
roles is behind ``Role``; what is the same for both - sessions, leases, deadlines, cancels, cache
deltas - is here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol, TypedDict

from kvferry.core.errors import RankLost
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.engine.cache_news import CacheNews
from kvferry.engine.in_flight import InFlight, Launcher
from kvferry.engine.plan import LayerDone, Runner, StepPlan, StepResult
from kvferry.engine.ports import FromRouter, RouterPort, SessionClosed, SessionOpened, send_failed
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.proto import worker_pb2 as pb

log = logging.getLogger(__name__)

APART = (State.WAITING, State.RESERVED)
"""States in which no step names a sequence, whatever runs."""


class TransferCounts(TypedDict):
    """Counts since the start, by reason."""

    dropped: Mapping[str, int]
    """Offers and slabs."""
    endings: Mapping[str, int]
    """Leases and transfers."""
    link_events: Mapping[str, int]
    preemptions: Mapping[str, int]
    """Sequences that had to give up their blocks, by how."""


class Role(Protocol):
    """What a prefill worker and a decode worker do differently."""

    sequences: Sequences
    ports: dict[Incarnation, RouterPort]
    apart: frozenset[str]
    """Kinds of messages that change no sequence but their own."""

    def receive(self, port: RouterPort, message: pb.RouterMessage) -> None:
        """A Reserve, Prefill, Start or Peers."""
        ...

    def transferred(self, event: object) -> None:
        """A terminal event of the KV plane."""
        ...

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run."""
        ...

    def plan_ahead(self) -> StepPlan | None:
        """While the step planned last computes: the one that ``plan`` will return unless something
        comes in between, with the token ids missing; None where that cannot be foreseen.
        """
        ...

    def layer_listener(self) -> LayerDone | None:
        """Who wants to know when layers of the step planned last are done, if anybody."""
        ...

    def commit(self, result: StepResult) -> None:
        """Take in the result of the step planned last."""
        ...

    def fail_step(self, error: Exception) -> None:
        """The step planned last could not be run: whoever caused it fails, the worker goes on."""
        ...

    def renewed(self, seqs: list[WorkerSequence]) -> None:
        """The leases of these end later now."""
        ...

    def end(self, seq: WorkerSequence) -> None:
        """Stop ``seq`` in whatever state it is and give back all it holds. Legal in every state."""
        ...

    def counts(self) -> tuple[int, int, int]:
        """(running sequences, waiting sequences, tokens still to prefill)."""
        ...

    def transfer_counts(self) -> TransferCounts:
        """What came of transfers so far. Called from any thread."""
        ...


class StepLoop:
    """Runs a role. ``turn`` is one round; ``run`` repeats it on a thread until ``stop``."""

    def __init__(
        self,
        role: Role,
        runner: Runner,
        clock: Callable[[], float],
        idle_s: float = 0.1,
        launcher: Launcher | None = None,
    ) -> None:
        """``launcher``: of the same steps, where they run on a device."""
        self.role = role
        self.runner = runner
        self.steps = 0
        self._clock = clock
        self._idle_s = idle_s
        self._launcher = launcher
        self._wakes: deque[Callable[[], None]] = deque()
        self._inbox: deque[object] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._news = CacheNews(role.sequences.pool)
        self._moved_s = clock()

    def post(self, event: object) -> None:
        """Hand over an event or a callable from any thread."""
        self._inbox.append(event)
        self._wake.set()

    def break_down(self, why: str) -> None:
        """End ``run`` with RankLost. Any thread may call it."""

        def raise_it() -> None:
            raise RankLost(why)

        self.post(raise_it)

    def announce(self, wake: Callable[[], None]) -> None:
        """Something was said on a port: call ``wake`` once this thread can spare the processor."""
        if self._launcher is None:
            wake()
        else:
            self._wakes.append(wake)

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            if not self.turn() and not self._inbox:
                self._wake.wait(self._idle_s)

    def turn(self) -> bool:
        """One round. Returns whether a step was run."""
        while self._inbox:
            self._handle(self._inbox.popleft())
        self._expire()
        plan = self.role.plan()
        if plan is not None:
            self._step(plan)
        elif self.role.counts()[0] == 0:
            self._moved_s = self._clock()
        if plan is None or self._launcher is None:
            self._say()  # else while the next step computes
        return plan is not None

    def load(self) -> pb.Load:
        """Called from any thread: a snapshot of plain counters."""
        running, waiting, waiting_tokens = self.role.counts()
        blocks = self.role.sequences.pool.counts()
        return pb.Load(
            running=running,
            waiting=waiting,
            waiting_tokens=max(0, waiting_tokens),  # a row may be changing hands
            free=blocks.free,
            reserved=blocks.reserved,
            in_use=blocks.in_use,
            cached=blocks.cached,
            fenced=blocks.fenced,
            steps=self.steps,
            stalled_s=max(0.0, self._clock() - self._moved_s) if running else 0.0,
            **self.role.transfer_counts(),
        )

    def _step(self, plan: StepPlan) -> None:
        try:
            result = self._result(plan)
        except RankLost:
            raise  # no step can run any more
        except Exception as error:
            log.exception("step %d failed", plan.step)
            self.role.fail_step(error)
            return
        self.steps += 1
        self._moved_s = self._clock()
        self.role.commit(result)

    def _result(self, plan: StepPlan) -> StepResult:
        if self._launcher is None:
            return self.runner.execute(plan, self.role.layer_listener())
        flight = self._launcher.launch(plan, self.role.layer_listener())
        self._while_it_computes(flight, self._launcher)
        return flight.wait()

    def _while_it_computes(self, flight: InFlight, launcher: Launcher) -> None:
        self._say()
        while self._inbox and self._is_apart(self._inbox[0]) and not flight.done():
            self._handle(self._inbox.popleft())
        self._say()
        if not flight.done():
            ahead = self.role.plan_ahead()
            if ahead is not None:
                launcher.prepare(ahead)

    def _is_apart(self, event: object) -> bool:
        """Whether ``event`` touches no sequence of a running step. In order of arrival, so that no
        message overtakes another.
        """
        if not isinstance(event, FromRouter):
            return False
        kind = event.message.WhichOneof("kind")
        if kind not in self.role.apart:
            return kind == "renew"
        request = getattr(event.message, kind).key.request
        seq = self.role.sequences.of_request(event.port.incarnation, request)
        return seq is None or seq.state in APART

    def _say(self) -> None:
        self._send_changes()
        while self._wakes:
            self._wakes.popleft()()

    def _handle(self, event: object) -> None:
        match event:
            case FromRouter(port, message):
                self._from_router(port, message)
            case SessionOpened(port):
                self._session_opened(port)
            case SessionClosed(port):
                self._session_closed(port)
            case _ if callable(event):
                event()
            case _:
                self.role.transferred(event)

    def _from_router(self, port: RouterPort, message: pb.RouterMessage) -> None:
        if self.role.ports.get(port.incarnation) is not port:
            return  # its session has ended: nothing would end what this begins
        sequences = self.role.sequences
        kind = message.WhichOneof("kind")
        if kind == "cancel":
            key = message.cancel.key
            attempt = AttemptKey(port.incarnation, RequestId(key.request), key.attempt)
            seq = sequences.get(attempt)
            if seq is not None:
                self.role.end(seq)
        elif kind == "renew":
            self.role.renewed(sequences.renew(port.incarnation, message.renew))
        else:
            self.role.receive(port, message)

    def _session_closed(self, port: RouterPort) -> None:
        if self.role.ports.get(port.incarnation) is not port:
            return  # its router has connected again
        del self.role.ports[port.incarnation]
        for seq in self.role.sequences:
            if seq.port is port:
                self.role.end(seq)

    def _expire(self) -> None:
        """Runs on every turn, whether or not anything else does: a full worker must be able to
        heal.
        """
        for seq in self.role.sequences.expired():
            self.role.end(seq)
            send_failed(seq.port, seq.key, "deadline", "lease or deadline ended")

    def _session_opened(self, port: RouterPort) -> None:
        earlier = self.role.ports.get(port.incarnation)
        if earlier is not None:
            # Its router has connected again before this end noticed: what it asked for is stale.
            self._session_closed(earlier)
        self._send_changes()  # to the others: the snapshot already holds these
        self.role.ports[port.incarnation] = port
        self._news.send_snapshot(port)

    def _send_changes(self) -> None:
        self._news.send_changes(self.role.ports.values())
