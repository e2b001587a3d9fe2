"""The senders of all ranks of a worker, as one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.core.errors import ProtocolError
from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.kv_transfer.group.endings import Endings
from kvferry.kv_transfer.group.orders import (
    Abort,
    Begin,
    Chunk,
    Chunks,
    Computed,
    Done,
    Failed,
    GivenUp,
    Probe,
    decode_answer,
)
from kvferry.kv_transfer.group.ranks import Ranks
from kvferry.kv_transfer.jobs import SendAborted, SendDone, SendEvent, SendFailed, SendJob
from kvferry.kv_transfer.sender import KvSender

LayerDone = Callable[[int, object], None]
"""(layers, event of the device), as the runner says it."""


class GroupSender:
    """Rank 0's sender, and orders to the others'. An attempt has one terminal event, after the last
    word of every pair of ranks.
    """

    def __init__(
        self,
        make: Callable[[Callable[[SendEvent], None]], KvSender],
        ranks: Ranks,
        on_event: Callable[[SendEvent], None],
        num_layers: int,
    ) -> None:
        """``make``: builds rank 0's own, given who hears its events."""
        self._ranks = ranks
        self._num_layers = num_layers
        self._on_event = on_event
        self._endings: Endings[SendEvent] = Endings(lambda event: event.key)
        self._lock = threading.Lock()
        self.own = make(self._ended)

    def begin(self, jobs: Sequence[SendJob]) -> None:
        """One job per rank of the receiver; as ``KvSender.begin``. Raises RankLost."""
        key = jobs[0].key
        with self._lock:
            self._endings.expect(key, len(jobs) * (1 + self._ranks.count))
        self._ranks.tell(Begin(list(jobs)))
        for job in jobs:
            self.own.begin(job)

    def follow(self, step: int, chunks: Sequence[Chunk]) -> LayerDone:
        """Report the chunks of the step to come layer by layer: what rank 0's runner has to call.
        The other ranks' runners are told. Raises RankLost.
        """
        self._ranks.tell(Chunks(step, list(chunks)))
        return layer_listener(self.own, chunks, self._num_layers)

    def computed(self, key: AttemptKey, layers_end: int, tokens_end: int) -> None:
        """As ``KvSender.computed``. Raises RankLost."""
        self._ranks.tell(Computed(key, layers_end, tokens_end))
        self.own.computed(key, layers_end, tokens_end)

    def abort(self, key: AttemptKey) -> None:
        """As ``KvSender.abort``; from any thread."""
        self._ranks.tell_if_there(Abort(key))
        self.own.abort(key)

    def probe(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> None:
        """As ``KvSender.probe``: what rank 0 finds is what is reported."""
        self._ranks.tell_if_there(Probe(peer, rank, endpoints))
        self.own.probe(peer, rank, endpoints)

    def answered(self, payload: bytes) -> None:
        """What another rank says. Raises msgspec.DecodeError, ProtocolError."""
        match decode_answer(payload):
            case Done(key, account):
                self._ended(SendDone(key, account))
            case Failed(key, reason, detail):
                self._ended(SendFailed(key, reason, detail))
            case GivenUp(key):
                self._ended(SendAborted(key))
            case answer:
                raise ProtocolError(f"{type(answer).__name__} is no answer of a sender")

    def close(self) -> None:
        """As ``KvSender.close``."""
        self.own.close()

    def _ended(self, event: SendEvent) -> None:
        with self._lock:
            word = self._endings.add(event)
        if word.is_first_bad:
            self.abort(event.key)
        if word.ended is not None:
            self._on_event(word.ended)


class Reports(Protocol):
    """One rank's sender, as far as layers concern it."""

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None: ...


def layer_listener(sender: Reports, chunks: Sequence[Chunk], num_layers: int) -> LayerDone:
    """Tells one rank's sender of the layers of a step as they are done."""

    def layer_done(layers: int, event: object) -> None:
        for chunk in chunks:
            if layers:
                sender.computed(chunk.key, layers, chunk.tokens_end, event)
            elif chunk.cached_end:
                # What was cached is there already, in all layers.
                sender.computed(chunk.key, num_layers, chunk.cached_end, event)

    return layer_done
