"""The choices of one prompt: one prefill samples all their first tokens, one block table serves
their prompt.

The first choice leads: its prefill is asked for a first token of every sample index. What it finds,
and where the KV is, it leaves here; the others wait for that and go on from it. Where it leaves
nothing - it failed, or ended with its first token - each goes its own way from the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.request import TokenStep
from kvferry.proto import worker_pb2 as pb
from kvferry.router.session import WorkerSession


@dataclass(frozen=True, slots=True)
class Fork:
    """Where a choice goes on from."""

    first: TokenStep
    """Its first token."""
    parent: pb.Key
    """The attempt whose prompt it shares."""
    prefill_worker: str
    decode: WorkerSession | None
    """Who holds the KV; None when no token follows the first."""


class Siblings:
    """Shared by the choices of one prompt."""

    def __init__(self, num_choices: int) -> None:
        self.num_choices = num_choices
        self._forks: asyncio.Future[Sequence[Fork]] = asyncio.get_running_loop().create_future()

    @property
    def is_settled(self) -> bool:
        return self._forks.done()

    def share(self, forks: Sequence[Fork]) -> None:
        """``forks[i]`` is for sample index ``i + 1``; none at all when nothing is shared.
        Idempotent: the first word counts.
        """
        if not self._forks.done():
            self._forks.set_result(forks)

    async def fork(self, sample_index: int) -> Fork | None:
        """Waits for the first choice. None: go your own way."""
        forks = await asyncio.shield(self._forks)
        return forks[sample_index - 1] if forks else None
