"""The load of the burst: sequences that decode, and long prompts that arrive among them at once."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from kvferry.core.request import GenerateRequest, Timeline
from kvferry.core.sampling import SamplingParams
from kvferry.router.engine import TokenEngine

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of what. Lengths in tokens."""

    sequences: int = 16
    """That decode before, during and after the burst."""
    sequence_len: int = 64
    """Their prompts."""
    most_tokens: int = 4096
    """Tokens after which such a sequence would end; it is cancelled long before."""
    settle_tokens: int = 8
    """That each of them gets with all others at work before the burst comes; two make a gap."""
    burst: int = 4
    burst_len: int = 1024
    burst_tokens: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Random tokens, which no cache knows."""

    sequences: Sequence[Sequence[int]]
    burst: Sequence[Sequence[int]]


def draw_prompts(load: Load, vocab_size: int, draw: random.Random) -> Prompts:
    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    return Prompts(
        sequences=prompts(load.sequences, load.sequence_len),
        burst=prompts(load.burst, load.burst_len),
    )


@dataclass(slots=True)
class Stream:
    """When the tokens of one request reached its client, in seconds of the clock."""

    clock: Clock = time.perf_counter
    sent_s: float = 0.0
    seen_s: list[float] = field(default_factory=list)
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, engine: TokenEngine, prompt: Sequence[int], num_tokens: int) -> None:
        """Send one greedy request, and return at its end."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        request = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampling)
        self.sent_s = self.clock()
        async with aclosing(engine.generate(request, 0, Timeline())) as steps:
            async for step in steps:
                self.seen_s += [self.clock()] * len(step.token_ids)
                self._grown.set()
        assert len(self.seen_s) == num_tokens, f"{len(self.seen_s)} tokens arrived"

    async def reaches(self, count: int) -> None:
        """Return once ``count`` tokens have arrived."""
        while len(self.seen_s) < count:
            self._grown.clear()
            await self._grown.wait()

    def gaps(self) -> list[tuple[float, float]]:
        """From each token to the next."""
        return list(itertools.pairwise(self.seen_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One burst as the clients of all requests saw it."""

    sequences: Sequence[Stream]
    burst: Sequence[Stream]
    decoding_s: float
    """From when on all sequences were decoding."""
    began_s: float
    """When the burst was sent."""
    ended_s: float
    """When its last token arrived."""


async def play(
    engine: TokenEngine, load: Load, prompts: Prompts, clock: Clock = time.perf_counter
) -> Played:
    """Let sequences decode, send the burst, and stop when each has had a token after its end.

    That last token closes the gap in which the burst ended, however long it was.
    """
    sequences = [Stream(clock) for _ in prompts.sequences]
    burst = [Stream(clock) for _ in prompts.burst]
    async with asyncio.TaskGroup() as group:
        decoding = [
            group.create_task(_outlast(stream.follow(engine, prompt, load.most_tokens)))
            for stream, prompt in zip(sequences, prompts.sequences, strict=True)
        ]
        await _grow(sequences, 1)
        decoding_s = clock()
        await _grow(sequences, load.settle_tokens)
        began_s = clock()
        async with asyncio.TaskGroup() as arriving:
            for stream, prompt in zip(burst, prompts.burst, strict=True):
                arriving.create_task(stream.follow(engine, prompt, load.burst_tokens))
        ended_s = clock()
        await _grow(sequences, 1)
        for task in decoding:
            task.cancel()
    return Played(
        sequences=sequences, burst=burst, decoding_s=decoding_s, began_s=began_s, ended_s=ended_s
    )


async def _outlast(following: Awaitable[None]) -> None:
    """Raises RuntimeError when the sequence ends by itself: what was measured is no steady load."""
    await following
    raise RuntimeError("a decoding sequence ended before the burst did")


async def _grow(streams: Iterable[Stream], by: int) -> None:
    """Return when each has had so many more tokens than now."""
    await asyncio.gather(*[stream.reaches(len(stream.seen_s) + by) for stream in streams])
