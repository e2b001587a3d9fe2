"""The router's queue: requests wait here, in order, until a pair of workers has room for the first.

Work is dispatched just in time: a worker is offered only while it would start soon, so that what
waits can still go elsewhere. The queue moves whenever a worker's state, load or count changes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import Overloaded, Unavailable
from kvferry.core.request import Timeline
from kvferry.router.index import PrefixIndex
from kvferry.router.pairs import LocalPair, Pair, PrefillOnly, RemotePair
from kvferry.router.policy import Candidate, Policy, computes_locally
from kvferry.router.progress import Progress
from kvferry.router.session import WorkerSession
from kvferry.router.workers import Role, WorkerView

BUSY_PAUSE_S = 0.01
"""Workers that were all busy are not asked more often than this, per request."""


@dataclass(slots=True, eq=False)
class _Waiter:
    progress: Progress
    timeline: Timeline
    pair: asyncio.Future[Pair]


class Dispatcher:
    """Chooses pairs for requests, first come first served."""

    def __init__(
        self, index: PrefixIndex, policy: Policy, queue_limit: int, local_tokens: int
    ) -> None:
        """``local_tokens``: a decode worker computes so many tokens of a prompt itself at most."""
        self.sessions: list[WorkerSession] = []
        self._index = index
        self._policy = policy
        self._queue_limit = queue_limit
        self._local_tokens = local_tokens
        self._queue: deque[_Waiter] = deque()
        self._handing: _Waiter | None = None
        """Has a pair and has not entered it yet, so that the counts do not show it."""
        self._moved = asyncio.Event()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def unavailable(self) -> str:
        """Why no request could be served now, however long it waited; empty when one could."""
        colocated = any(session.view.role is Role.BOTH for session in self.sessions)
        for role in (Role.BOTH,) if colocated else (Role.PREFILL, Role.DECODE):
            views = [s.view for s in self.sessions if s.view.role is role]
            if not any(view.routable for view in views):
                reasons = "; ".join(f"{v.worker_id or v.address} {v.reason}" for v in views)
                name = "" if role is Role.BOTH else f"{role} "
                return f"no {name}worker: {reasons or 'none is connected yet'}"
        return ""

    async def choose(self, progress: Progress, timeline: Timeline) -> Pair:
        """Wait for a pair. Raises Overloaded when the queue is full, Unavailable when none can
        come.
        """
        self._refuse_when_hopeless()
        if len(self._queue) >= self._queue_limit:
            raise Overloaded(f"{self._queue_limit} requests are waiting already")
        loop = asyncio.get_running_loop()
        started = loop.time()
        waiter = _Waiter(progress, timeline, loop.create_future())
        self._queue.append(waiter)
        try:
            self.pump()
            return await waiter.pair
        finally:
            timeline.queue_s += loop.time() - started
            if self._handing is waiter:
                self._handing = None
            else:
                self._queue.remove(waiter)
            # Soon, not now: the caller enters its pair first, and is counted.
            loop.call_soon(self.pump)

    async def another_prefill(self, progress: Progress, busy: set[WorkerSession]) -> WorkerSession:
        """A prefill worker that is none of ``busy``; all are asked again, and ``busy`` is emptied,
        after something moved.

        Only the worker itself says no: prompts counted there may wait for the blocks on the decode
        side that the asking request holds, so that to wait for their count could be for ever.
        """
        while True:
            self._refuse_when_hopeless()
            prefill = [s for s in self.sessions if s.view.role is Role.PREFILL]
            ready = [s for s in prefill if s.view.routable and s not in busy]
            if ready:
                candidates = self._candidates(progress, ready, by_tokens=True)
                number, _ = self._policy.choose(len(progress.tokens), candidates, candidates)
                return self._session(number)
            self._moved.clear()
            await self._moved.wait()
            # It may have been the count of another request that waits like this one.
            await asyncio.sleep(BUSY_PAUSE_S)
            busy.clear()

    def pump(self) -> None:
        """Hand the front of the queue a pair if there is room, or its refusal if none can come.

        One at a time: the next is looked at when this one has left with what it was given.
        """
        self._moved.set()
        if self._handing is not None or not self._queue or self._queue[0].pair.done():
            return
        waiter = self._queue[0]
        hopeless = self.unavailable()
        pair = None if hopeless else self._pair(waiter)
        if hopeless:
            waiter.pair.set_exception(Unavailable(hopeless))
        elif pair is not None:
            waiter.pair.set_result(pair)
        else:
            return
        self._handing = self._queue.popleft()

    def _pair(self, waiter: _Waiter) -> Pair | None:
        progress, timeline = waiter.progress, waiter.timeline
        able = [s for s in self.sessions if s.view.takes_prompt(len(progress.tokens))]
        prefill = [s for s in able if s.view.role is Role.PREFILL]
        decode = [s for s in self.sessions if s.view.role is not Role.PREFILL]
        if prefill and progress.last_token_next:
            first = self._candidates(progress, prefill, by_tokens=True)
            number, _ = self._policy.choose(len(progress.tokens), first, first)
            return PrefillOnly(progress, timeline, self._session(number), self.another_prefill)
        decode = [s for s in decode if s.view.takes_reservations]
        both = [s for s in decode if s.view.role is Role.BOTH and s in able]
        prefill = prefill or both
        decode = [s for s in decode if s.view.role is Role.DECODE] or both
        local = self._local(progress, prefill, [s for s in able if s in decode])
        if local is not None:
            return LocalPair(progress, timeline, local)
        if not prefill or not decode:
            return None
        numbers = self._policy.choose(
            len(progress.tokens),
            self._candidates(progress, prefill, by_tokens=True),
            self._candidates(progress, decode, by_tokens=False),
        )
        p, d = map(self._session, numbers)
        if d.view.role is Role.BOTH:
            return LocalPair(progress, timeline, d)
        return RemotePair(progress, timeline, p, d, self.another_prefill)

    def _local(
        self, progress: Progress, prefill: list[WorkerSession], decode: list[WorkerSession]
    ) -> WorkerSession | None:
        """A decode worker that holds so much of the prompt that it had best compute the rest."""
        decode = [s for s in decode if s.view.role is Role.DECODE and s.view.keeps_exact_kv]
        if not decode or not self._local_tokens:
            return None
        # Without a pair of its own the prompt would wait for a prefill worker.
        local = self._candidates(progress, decode, by_tokens=True)
        best = max(local, key=lambda c: (c.cached_tokens, -c.load, -c.number))
        remote = self._candidates(progress, prefill, by_tokens=True)
        if computes_locally(len(progress.tokens), best, remote, self._local_tokens):
            return self._session(best.number)
        return None

    def _candidates(
        self, progress: Progress, sessions: Sequence[WorkerSession], *, by_tokens: bool
    ) -> list[Candidate]:
        return [
            Candidate(
                number=session.view.number,
                cached_tokens=self._cached_tokens(progress, session.view),
                load=session.view.prefill_tokens if by_tokens else session.view.active,
            )
            for session in sessions
        ]

    def _cached_tokens(self, progress: Progress, view: WorkerView) -> int:
        size = view.hello.layout.block_size
        chain = progress.chain(view.hello.root_hash, size)  # type: ignore[arg-type]
        return size * self._index.matched_blocks(chain, [view.number])[view.number]

    def _session(self, number: int) -> WorkerSession:
        return next(s for s in self.sessions if s.view.number == number)

    def _refuse_when_hopeless(self) -> None:
        hopeless = self.unavailable()
        if hopeless:
            raise Unavailable(hopeless)
