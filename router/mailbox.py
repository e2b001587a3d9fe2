"""What the workers tell about one attempt, in order of arrival.

One mailbox is registered with both sessions of a pair, so that trouble on either side is heard
whichever side is being waited for. It is bounded by what a request can produce: a few replies and
max_tokens tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvferry.core.errors import AttemptFailed, InvalidRequest, Preempted, TransferFailed, WorkerLost
from kvferry.core.request import TokenStep
from kvferry.proto import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class Lost:
    """The session to a worker ended."""

    worker_id: str


Item = pb.WorkerMessage | TokenStep | Lost


class Mailbox:
    """The events of one attempt."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[Item] = asyncio.Queue()

    def put(self, item: Item) -> None:
        self._items.put_nowait(item)

    async def next(self) -> pb.WorkerMessage | TokenStep:
        """The next reply or tokens. Raises AttemptFailed, or InvalidRequest, when the attempt
        is over.
        """
        item = await self._items.get()
        if isinstance(item, TokenStep):
            return item
        if isinstance(item, Lost):
            raise WorkerLost(f"the session to worker {item.worker_id} ended")
        match item.WhichOneof("kind"):
            case "preempted":
                raise Preempted("the decode worker ran out of blocks")
            case "failed":
                raise _failure(item.failed)
            case "refused" if item.refused.never:
                raise InvalidRequest("prompt", item.refused.reason)
            case "refused":
                raise AttemptFailed(item.refused.reason)
        return item


def _failure(failed: pb.Failed) -> Exception:
    if failed.kind == "transfer":
        return TransferFailed(f"KV transfer failed: {failed.message}")
    if failed.kind == "refused":
        return InvalidRequest("prompt", failed.message)
    return AttemptFailed(f"{failed.kind}: {failed.message}")
