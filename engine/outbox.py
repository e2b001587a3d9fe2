"""What a worker has to say to one router, between the step loop's thread and the session's writer.

Tokens and replies leave before load, load before cache deltas. Tokens that have not left yet are
merged with those of the next step. The box is bounded: a router that does not keep up loses its
session, and no router can hold up the step loop.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvferry.core.ids import Incarnation
from kvferry.proto import worker_pb2 as pb

MAX_MESSAGES = 8192
MAX_MERGED_TOKENS = 16384


class Outbox:
    """A RouterPort. ``notify`` is called, on the sender's thread, when the box stops being
    empty.
    """

    def __init__(self, incarnation: Incarnation, notify: Callable[[], None]) -> None:
        self._incarnation = incarnation
        self._notify = notify
        self._lock = threading.Lock()
        self._replies: deque[pb.WorkerMessage] = deque()
        self._deltas: deque[pb.WorkerMessage] = deque()
        self._load: pb.WorkerMessage | None = None
        self._closed = False
        self.overflowed = False

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    def send(self, message: pb.WorkerMessage) -> None:
        with self._lock:
            if self._closed or self.overflowed:
                return
            was_empty = not (self._replies or self._deltas or self._load)
            self._put(message)
            if len(self._replies) + len(self._deltas) > MAX_MESSAGES:
                self.overflowed = True
                was_empty = True
        if was_empty:
            self._notify()

    def take(self) -> pb.WorkerMessage | None:
        """The next message to write, or None."""
        with self._lock:
            if self._replies:
                return self._replies.popleft()
            if self._load is not None:
                load, self._load = self._load, None
                return load
            return self._deltas.popleft() if self._deltas else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._replies.clear()
            self._deltas.clear()
            self._load = None

    def _put(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "load":
            self._load = message
        elif kind == "cache_delta":
            self._deltas.append(message)
        elif not (kind == "tokens" and self._replies and _merge(self._replies[-1], message)):
            self._replies.append(message)


def _merge(last: pb.WorkerMessage, new: pb.WorkerMessage) -> bool:
    """Add the tokens of ``new`` to ``last`` where both are plain tokens and not too many."""
    if last.WhichOneof("kind") != "tokens" or last.tokens.logprobs or new.tokens.logprobs:
        return False
    if len(last.tokens.requests) > MAX_MERGED_TOKENS:
        return False
    last.tokens.MergeFrom(new.tokens)
    return True
