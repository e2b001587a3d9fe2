"""Virtual time, and the threads of the real system as actors on it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

NEVER = float("inf")
HORIZON_S = 600.0
"""A schedule that is still busy after this much virtual time hangs."""

MAX_EVENTS = 200_000


class Hang(AssertionError):
    """Virtual time ran out, or an actor runs for ever at one point of it."""


class Agenda:
    """What is to happen, in order of time; equal times keep their order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.defect: Callable[[str, Exception], None] = _raise
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    def clock(self) -> float:
        return self.now

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        if when < self.now:
            when = self.now
        heapq.heappush(self._heap, (when, self._number, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def pass_time(self, seconds: float) -> None:
        """Let others act for so long. An actor that calls this is busy meanwhile, as a thread in
        the middle of its work is.
        """
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self._next()
        self.now = max(self.now, until)

    def run_while(self, unfinished: Callable[[], bool], until: float) -> bool:
        """Whether it was finished before then."""
        while unfinished():
            if not self._heap or self._heap[0][0] > until:
                self.now = max(self.now, until)
                return False
            self._next()
        return True

    def _next(self) -> None:
        when, _, call, arguments = heapq.heappop(self._heap)
        if when > self.now:
            self.now = when
        self.events += 1
        if self.now > HORIZON_S or self.events > MAX_EVENTS:
            raise Hang(f"still busy after {self.now:.1f} s and {self.events} events")
        try:
            call(*arguments)
        except Hang:
            raise
        except Exception as error:
            # Not the fault of whoever happens to let time pass.
            self.defect(f"{call}: {error!r}", error)


def _raise(text: str, error: Exception) -> None:
    raise error


class Killed(BaseException):
    """Unwinds an actor that was killed in the middle of its work."""


class Actor:
    """A thread of the real system: it runs when woken or due, and never inside itself."""

    def __init__(self, agenda: Agenda, name: str, turn: Callable[[], float]) -> None:
        """``turn`` does what is to be done and returns in how many seconds it wants to go on."""
        self.name = name
        self.busy = False
        self.dead = False
        self._woken = False
        self._frozen_until = 0.0
        self._agenda = agenda
        self._turn = turn
        self._due = NEVER

    def wake(self, after_s: float = 0.0) -> None:
        """Run after so long, or earlier if it is due by then anyway."""
        self._wake_at(self._agenda.now + after_s)

    @property
    def frozen(self) -> bool:
        return self._agenda.now < self._frozen_until

    def freeze(self, seconds: float) -> None:
        """Like a process that is stopped: what it was doing goes on later."""
        self._frozen_until = max(self._frozen_until, self._agenda.now + seconds)

    def kill(self) -> None:
        """Like a process that is killed: it never runs again."""
        self.dead = True

    def _wake_at(self, due: float) -> None:
        if due < self._due and not self.dead:
            self._due = due
            self._agenda.at(due, self._run, due)

    def check_alive(self) -> None:
        """Raises Killed."""
        if self.dead:
            raise Killed(self.name)

    def _run(self, due: float) -> None:
        if due != self._due or self.dead:
            return  # woken earlier since
        if self.frozen:
            self._due = NEVER
            self._wake_at(self._frozen_until)
            return
        if self.busy:
            self._due = NEVER
            self._woken = True
            return
        self.busy, self._due, self._woken = True, NEVER, False
        try:
            wait_s = self._turn()
        except Killed:
            if not self.dead:
                raise
        except Hang:
            raise
        except Exception as error:
            # A defect ends the thread, as it does in the real system.
            self.kill()
            self._agenda.defect(f"{self.name}: {error!r}", error)
        else:
            self.busy = False
            if self._woken:
                wait_s = 0.0
            if wait_s < NEVER:
                self.wake(wait_s)
