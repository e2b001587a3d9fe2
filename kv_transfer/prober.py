"""Measures the paths of a sender, on a thread of its own and one after the other; ``Choices`` hears
of it.

The thread lives while there is something to measure.
"""

from __future__ import annotations

import ipaddress
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.core.units import parse_address
from kvferry.kv_transfer.choices import Choices, Path
from kvferry.kv_transfer.endpoints import Medium
from kvferry.kv_transfer.peaks import peak_of
from kvferry.kv_transfer.probe import Speed

AGAIN_S = 5.0
"""After a path broke, until it is measured again; twice as long each time."""
MAX_AGAIN_S = 300.0
MAX_DOUBLINGS = 16
"""More are beyond MAX_AGAIN_S; a thousand, beyond a float."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the matrix of all pairs has on one rank of a receiver: a row per transport."""

    peer: Incarnation
    rank: int
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class _Task:
    peer: Incarnation
    rank: int
    endpoints: tuple[str, ...]
    due_s: float


class Prober:
    """Any thread may call it."""

    def __init__(
        self,
        choices: Choices,
        measure: Callable[[str], Speed],
        on_probed: Callable[[Probed], None] = lambda probed: None,
        peak: Callable[[Medium], float] = peak_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``measure`` an endpoint; it raises LinkLost, ProtocolError. ``on_probed`` is called on
        the prober's thread after each rank.
        """
        self._choices = choices
        self._measure = measure
        self._on_probed = on_probed
        self._peak = peak
        self._clock = clock
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def probe(
        self, peer: Incarnation, rank: int, endpoints: tuple[str, ...], delay_s: float = 0.0
    ) -> None:
        """Measure all paths to a rank of a receiver, after ``delay_s``. Does not wait.

        What is still to be done for that rank is not done twice; nothing happens after stop.
        """
        task = _Task(peer, rank, endpoints, self._clock() + delay_s)
        with self._changed:
            if self._closed:
                return
            same = [other for other in self._tasks if (other.peer, other.rank) == (peer, rank)]
            if any(other.due_s <= task.due_s for other in same):
                return
            self._tasks = [other for other in self._tasks if other not in same] + [task]
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def broken(self, path: Path, endpoints: tuple[str, ...]) -> None:
        """A path broke: measure again in a while."""
        doublings = min(path.num_breaks - 1, MAX_DOUBLINGS)
        delay_s = min(MAX_AGAIN_S, AGAIN_S * 2.0**doublings)
        self.probe(path.peer, path.rank, endpoints, delay_s)

    def stop(self) -> list[threading.Thread]:
        """End after the path that is being measured. The thread that will end, if there is one."""
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._changed.notify_all()
            return [] if self._thread is None else [self._thread]

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-prober")
        self._thread.start()

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                self._probe(task)
        finally:
            with self._changed:
                # A defect ended the thread: what is left, and what comes, has a new one.
                if self._thread is threading.current_thread():
                    self._thread = None
                    if self._tasks and not self._closed:
                        self._start()

    def _next(self) -> _Task | None:
        with self._changed:
            while self._tasks:
                task = min(self._tasks, key=lambda one: one.due_s)
                wait_s = task.due_s - self._clock()
                if wait_s <= 0:
                    self._tasks.remove(task)
                    return task
                self._changed.wait(wait_s)
            self._thread = None
            return None

    def _probe(self, task: _Task) -> None:
        whom = (task.peer, task.rank, task.endpoints)
        for path in self._choices.paths(*whom):
            if self._closed:
                return
            if not path.no_means:
                self._choices.measured(self._measured(path))
        with suppress(LinkRefused):  # each path says why
            self._choices.choose(*whom)
        paths = self._choices.paths(*whom)
        self._on_probed(Probed(task.peer, task.rank, tuple(paths)))
        if any(not path.why_not for path in paths):
            # The peer lives: what is broken may be mended.
            for path in paths:
                if path.broken and not path.no_means:
                    self.broken(path, task.endpoints)

    def _measured(self, path: Path) -> Path:
        try:
            speed = self._measure(path.endpoint)
        except (LinkLost, ProtocolError) as error:
            return replace(path, broken=str(error) or "lost")
        return replace(
            path,
            rate=speed.bytes_per_s,
            peak=speed.bare_bytes_per_s if _is_remote(path) else self._peak_of(path.medium),
            round_trip_s=speed.round_trip_s,
            broken="",
            num_breaks=0,
        )

    def _peak_of(self, medium: Medium) -> float:
        with suppress(OSError):
            return self._peak(medium)
        return 0.0  # no descriptors left, or no time on the processor; next time, perhaps


def _is_remote(path: Path) -> bool:
    """Whether the path leaves this host: then a bare stream over it stands for its medium."""
    if path.medium is not Medium.NETWORK:
        return False
    try:
        host, _ = parse_address(path.endpoint.partition(":")[2])
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
