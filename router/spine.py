"""The life of a request, in one place.

    QUEUED        dispatcher.choose        until a (prefill, decode) pair has room
    RESERVED      entering the pair        the decode side holds a lease
    PREFILLING    pair.prefill             the first token, from the prefill side
    TRANSFERRING  pair.decode, until its   KV moves, is verified and scattered
    DECODING      first token, and after   the other tokens, from the decode side
    FINISHED      leaving the pair         by end, cancel or error: both sides are released

``generate`` runs this as often as it takes: an attempt that fails - worker lost, preempted,
transfer failed - is followed by another that starts from prompt + emitted tokens, so that the
client sees neither gap nor duplicate.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvferry.core.errors import AttemptFailed, Overloaded, Preempted, Unavailable
from kvferry.core.ids import RequestId
from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.router.dispatcher import Dispatcher
from kvferry.router.pairs import ForkedPair, Pair
from kvferry.router.progress import Progress
from kvferry.router.siblings import Siblings

log = logging.getLogger(__name__)

RETRY_DELAY_S = 0.05
REVIVAL_S = 30.0
"""A request that was dispatched once waits this long for its workers to be started again."""
REVIVAL_CHECK_S = 0.2


class Spine:
    """Turns requests into tokens."""

    def __init__(self, dispatcher: Dispatcher, max_attempts: int) -> None:
        self.running = 0
        self._dispatcher = dispatcher
        self._max_attempts = max_attempts
        self._numbers = itertools.count(1)

    async def generate(
        self,
        request: GenerateRequest,
        sample_index: int,
        timeline: Timeline,
        siblings: Siblings | None = None,
    ) -> AsyncGenerator[TokenStep, None]:
        """One choice, through as many attempts as it takes. See ``router.engine.TokenEngine``."""
        progress = Progress(request, sample_index, RequestId(next(self._numbers)), siblings)
        watch = _Stopwatch(timeline)
        patience = _Patience(self._max_attempts)
        self.running += 1
        try:
            while True:
                try:
                    async with aclosing(self._attempt(progress, timeline)) as steps:
                        async for step in steps:
                            progress.add(step)
                            watch.saw(step)
                            patience.renew()
                            yield step
                    return
                except Unavailable as error:
                    self._part(progress)
                    # Before the first dispatch, "no" is the answer; after it, workers may come
                    # back.
                    if progress.attempt == 1 and not isinstance(error, AttemptFailed):
                        raise
                    log.warning("request %d.%d: %s", progress.number, progress.attempt, error)
                    progress.given_back += isinstance(error, Preempted)
                    delay_s = patience.delay_s(error)
                    if delay_s is None:
                        raise
                    await asyncio.sleep(delay_s)
        finally:
            self.running -= 1
            self._part(progress)

    async def _attempt(
        self, progress: Progress, timeline: Timeline
    ) -> AsyncGenerator[TokenStep, None]:
        progress.attempt += 1
        timeline.attempts = progress.attempt
        pair = await self._forked(progress, timeline)
        if pair is None:
            pair = await self._dispatcher.choose(progress, timeline)
        async with pair:
            yield await pair.prefill()
            while (step := await pair.decode()) is not None:
                yield step

    def _part(self, progress: Progress) -> None:
        """An attempt has ended. Those that wait for its prompt hold reservations meanwhile, which
        the next attempt might have to wait for.
        """
        if progress.siblings is not None and progress.sample_index == 0:
            progress.siblings.part()

    async def _forked(self, progress: Progress, timeline: Timeline) -> Pair | None:
        """For the first attempt of a choice whose prompt another one brings."""
        siblings = progress.siblings
        if siblings is None or progress.sample_index == 0 or progress.attempt > 1:
            return None
        place = await siblings.place()
        return None if place is None else ForkedPair(progress, timeline, siblings, place)


class _Patience:
    """How often, and how long, a request goes on without progress."""

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._failures = 0
        self._alone_since_s: float | None = None

    def renew(self) -> None:
        """A token came."""
        self._failures = 0
        self._alone_since_s = None

    def delay_s(self, error: Unavailable) -> float | None:
        """How long to wait before the next attempt; None when there shall be none."""
        if isinstance(error, AttemptFailed | Overloaded):
            self._failures += 1
            if self._failures >= self._max_attempts:
                return None
            return RETRY_DELAY_S * 2.0 ** (self._failures - 1)
        # There is no worker, so that nothing was dispatched: what counts is time.
        now = time.monotonic()
        if self._alone_since_s is None:
            self._alone_since_s = now
        return REVIVAL_CHECK_S if now - self._alone_since_s < REVIVAL_S else None


class _Stopwatch:
    """Fills in what the router itself sees of time and tokens."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._started_s = time.monotonic()
        self._first_s = 0.0

    def saw(self, step: TokenStep) -> None:
        now = time.monotonic()
        timeline = self._timeline
        if not timeline.output_tokens:
            self._first_s = now
            timeline.ttft_s = now - self._started_s
        timeline.output_tokens += len(step.token_ids)
        timeline.decode_s = now - self._first_s
