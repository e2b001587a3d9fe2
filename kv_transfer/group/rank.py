"""The KV plane of a rank other than 0: does what rank 0 orders, and says how it ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.errors import ProtocolError
from kvferry.kv_transfer.group.orders import (
    Abort,
    Answer,
    AnyOrder,
    Begin,
    Blocks,
    Chunk,
    Chunks,
    Computed,
    Counts,
    Done,
    Expect,
    Expected,
    Failed,
    GivenUp,
    Probe,
    Release,
    Renew,
    decode_order,
    encode,
)
from kvferry.kv_transfer.group.sender import LayerDone, layer_listener
from kvferry.kv_transfer.jobs import (
    ReceiveClosed,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
)
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender

Say = Callable[[bytes], None]
"""To rank 0. Raises RankLost."""


class _RankPlane(ABC):
    """What both directions do: keep the generations of rank 0's blocks."""

    def __init__(self, generations: NDArray[np.uint32], say: Say) -> None:
        self._generations = generations
        self._say = say

    def handle(self, payload: bytes) -> None:
        """An order. Raises msgspec.DecodeError, ProtocolError, RankLost."""
        order = decode_order(payload)
        if isinstance(order, Blocks):
            self._generations[order.block_ids] = order.generations
        else:
            self._obey(order)

    def layer_listener(self, step: int) -> LayerDone | None:
        return None

    @abstractmethod
    def _obey(self, order: AnyOrder) -> None: ...

    def _answer(self, answer: Answer) -> None:
        self._say(encode(answer))


class SenderRank(_RankPlane):
    """A rank of a prefill worker."""

    def __init__(
        self,
        make: Callable[[Callable[[SendEvent], None]], KvSender],
        num_layers: int,
        generations: NDArray[np.uint32],
        say: Say,
    ) -> None:
        """``make``: builds the sender, given who hears its events; ``generations``: the live array
        of its memory.
        """
        super().__init__(generations, say)
        self._num_layers = num_layers
        self._chunks: dict[int, list[Chunk]] = {}
        self.sender = make(self._ended)

    def layer_listener(self, step: int) -> LayerDone | None:
        chunks = self._chunks.pop(step, None)
        return layer_listener(self.sender, chunks, self._num_layers) if chunks else None

    def close(self) -> None:
        self.sender.close()

    def _obey(self, order: AnyOrder) -> None:
        match order:
            case Begin(jobs):
                for job in jobs:
                    self.sender.begin(job)
            case Chunks(step, chunks):
                self._chunks[step] = chunks
            case Computed(key, layers_end, tokens_end):
                self.sender.computed(key, layers_end, tokens_end)
            case Abort(key):
                self.sender.abort(key)
            case Probe(peer, rank, endpoints):
                self.sender.probe(peer, rank, endpoints)
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for a sender")

    def _ended(self, event: SendEvent) -> None:
        match event:
            case SendDone(key, account):
                self._answer(Done(key, account))
            case SendFailed(key, reason, detail):
                self._answer(Failed(key, reason, detail))
            case SendAborted(key):
                self._answer(GivenUp(key))


class ReceiverRank(_RankPlane):
    """A rank of a decode worker."""

    def __init__(
        self,
        make: Callable[[Callable[[ReceiveEvent], None]], KvReceiver],
        generations: NDArray[np.uint32],
        say: Say,
    ) -> None:
        """As ``SenderRank``."""
        super().__init__(generations, say)
        self.receiver = make(self._ended)

    def close(self) -> None:
        self.receiver.close()

    def _obey(self, order: AnyOrder) -> None:
        match order:
            case Expect(job):
                self.receiver.expect(job)
                self._answer(Expected(job.lease))
            case Renew(lease, deadline_s):
                self.receiver.renew(lease, deadline_s)
            case Release(lease):
                self.receiver.release(lease)
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for a receiver")

    def _ended(self, event: ReceiveEvent) -> None:
        dropped = {str(reason): count for reason, count in self.receiver.counters.items()}
        tallies = {str(what): count for what, count in self.receiver.tallies.items()}
        self._answer(Counts(dropped, tallies))
        match event:
            case ReceiveDone(key, lease, account):
                self._answer(Done(key, account, lease))
            case ReceiveFailed(key, lease, reason, detail):
                self._answer(Failed(key, reason, detail, lease))
            case ReceiveClosed(key, lease):
                self._answer(GivenUp(key, lease))
