"""Worlds that go by a test's script instead of a random schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kv_sim.invariants import RECLAIM_S
from kv_sim.router import Request, Router
from kv_sim.setup import Setup
from kv_sim.workers import DecodeSide, PrefillSide
from kv_sim.world import World
from kvferry.engine.sequences import State

STEP_S = 0.001


class Script:
    """One world and what a test does to it. Every wait is bounded in virtual time."""

    def __init__(self, setup: Setup | None = None, **changes: Any) -> None:
        self.world = World(0, setup=setup or Setup(**changes))
        self.world.agenda.after(0.0, self.world.invariants.watch)
        self._numbers = 0
        self.until(self.world.is_whole)

    @property
    def now(self) -> float:
        return self.world.agenda.now

    @property
    def router(self) -> Router:
        return self.world.routers[-1]

    @property
    def prefill(self) -> PrefillSide:
        worker = self.world.workers["P0"]
        assert isinstance(worker, PrefillSide)
        return worker

    @property
    def decode(self) -> DecodeSide:
        worker = self.world.workers["D0"]
        assert isinstance(worker, DecodeSide)
        return worker

    def submit(
        self, prompt: Sequence[int], max_tokens: int = 3, wait_s: float = 60.0, local: bool = False
    ) -> Request:
        self._numbers += 1
        request = Request(self._numbers, list(prompt), max_tokens, self.now + wait_s, local)
        self.router.submit(request)
        return request

    def leave(self, request: Request) -> None:
        """Its client is gone."""
        for router in self.world.routers:
            router.cancel(request.number)

    def wait(self, seconds: float) -> None:
        self.world.agenda.pass_time(seconds)

    def until(self, reached: Callable[[], object], within_s: float = 10.0) -> None:
        """Raises AssertionError when it is not reached in time."""
        end = self.now + within_s
        while not reached():
            assert self.now < end, f"not reached in {within_s} s: {self.why()}"
            self.wait(STEP_S)

    def done(self, *requests: Request, within_s: float = 10.0) -> None:
        """Wait for their ends, which must be right."""
        self.until(lambda: all(r.outcome for r in requests), within_s)
        for request in requests:
            assert (request.outcome, request.output) == ("done", request.expected)

    def states(self, request: Request) -> tuple[State | None, State | None]:
        """Where it is, (on the prefill worker, on the decode worker)."""
        found = [
            next((s.state for s in w.sequences if s.key.request == request.number), None)
            for w in (self.prefill, self.decode)
        ]
        return found[0], found[1]

    def held(self) -> int:
        """Blocks that some request still holds anywhere."""
        return self.world.invariants.held_blocks()

    def reclaimed(self, within_s: float = RECLAIM_S) -> None:
        """Wait until no request holds a block anywhere."""
        self.until(lambda: not self.held(), within_s)

    def finish(self) -> None:
        """All is over: everything is given back, and no rule was broken."""
        self.until(lambda: not self.world.invariants.at_rest())
        self.world.invariants.check_end()
        assert not self.world.violations, self.world.violations

    def why(self) -> str:
        return self.world.invariants.at_rest()
