"""The keys by which the ranks of a worker make their process group: kept by rank 0, put and asked
for over the channels of the others, which have proved themselves. Nothing else listens.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from kvferry.core.errors import ProtocolError
from kvferry.engine.rank_channel import RankChannel
from kvferry.engine.rank_messages import Get, Put, Value


def first_store(timeout_s: float) -> dist.Store:
    """Rank 0's own. ``timeout_s``: how long a key is waited for."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class RankStore(dist.Store):
    """Another rank's. torch calls it on the thread that makes a group."""

    def __init__(self, channel: RankChannel) -> None:
        super().__init__()
        self._channel = channel

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._channel.send(Put(key, data))

    def get(self, key: str) -> bytes:
        self._channel.send(Get(key))
        answer = self._channel.receive()
        if not isinstance(answer, Value):
            raise ProtocolError("between ranks: Value answers Get")
        return answer.value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """The limit is rank 0's."""
        for key in keys:
            self.get(key)

    def clone(self) -> dist.Store:
        return self
