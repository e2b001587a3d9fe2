"""The seam between the router's two APIs and its spine: tokens in, tokens out, no text."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from kvferry.core.request import GenerateRequest, Timeline, TokenStep
from kvferry.proto import kvferry_pb2
from kvferry.router.siblings import Siblings


class TokenEngine(Protocol):
    """What the APIs need of whatever turns one prompt into tokens."""

    def generate(
        self,
        request: GenerateRequest,
        sample_index: int,
        timeline: Timeline,
        siblings: Siblings | None = None,
    ) -> AsyncGenerator[TokenStep, None]:
        """One choice of a request. The last step, and only it, carries a finish reason.
        ``siblings``: the same one for all choices of a prompt, of which 0 has to be among them.

        Fills ``timeline`` on the way. Closing the iterator (``aclose``), or cancelling the task
        that runs it, stops the choice everywhere. Raises KvferryError.
        """
        ...

    def status(self) -> kvferry_pb2.StatusResponse:
        """Pools, workers and load as they are now."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether requests can be served now, and the reason if not."""
        ...
