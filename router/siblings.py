"""The choices of one prompt: one prefill samples all their first tokens, one set of blocks has it.
The first choice leads. Once it has a decode worker the others reserve there too, as forks of it,
and wait; its prefill is asked for a first token of every sample index, and with those all go on.
Where it leaves nothing, because it failed, each goes its own way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.request import TokenStep
from kvferry.proto import worker_pb2 as pb
from kvferry.router.session import WorkerSession


@dataclass(frozen=True, slots=True)
class Place:
    """Where the KV of the prompt will be."""

    parent: pb.Key
    """The attempt that brings it."""
    decode: WorkerSession | None
    """None when no token follows the first."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """What the prefill sampled."""

    steps: Sequence[TokenStep]
    """``steps[i]`` is for sample index ``i + 1``."""
    worker_id: str
    """Of the prefill worker."""


class Siblings:
    """Shared by the choices of one prompt. The first word on each counts."""

    def __init__(self, num_choices: int) -> None:
        loop = asyncio.get_running_loop()
        self.num_choices = num_choices
        self._place: asyncio.Future[Place | None] = loop.create_future()
        self._firsts: asyncio.Future[FirstTokens | None] = loop.create_future()

    @property
    def is_settled(self) -> bool:
        """Whether first tokens are known, or will never be."""
        return self._firsts.done()

    def meet(self, place: Place) -> None:
        """The first choice holds a reservation."""
        if not self._place.done():
            self._place.set_result(place)

    def share(self, firsts: FirstTokens) -> None:
        """Its prompt is computed."""
        if not self._firsts.done():
            self._firsts.set_result(firsts)

    def part(self) -> None:
        """The first choice, or its first attempt, has ended: what it has not left it never will."""
        if not self._place.done():
            self._place.set_result(None)
        if not self._firsts.done():
            self._firsts.set_result(None)

    async def place(self) -> Place | None:
        """Waits for the first choice. None: go your own way."""
        return await asyncio.shield(self._place)

    async def firsts(self) -> FirstTokens | None:
        """Waits for its prefill. None: it has failed."""
        return await asyncio.shield(self._firsts)
