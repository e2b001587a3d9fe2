"""Rank 0's hold on the other ranks of its worker.

    open ─▶ each rank joins ─▶ process group ─▶ each loads its part, is ready ─▶ steps ... ─▶ close

A thread per rank reads what it says; a rank that ends, at whatever point, is told to ``on_lost``
at once. Nothing here waits without a limit.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvferry.core.errors import ProtocolError, RankLost
from kvferry.core.ids import Incarnation, new_incarnation
from kvferry.engine.rank_channel import RankChannel, RankListener
from kvferry.engine.rank_messages import (
    Event,
    Fault,
    Get,
    Join,
    Message,
    Put,
    Ready,
    Stop,
    Value,
    Welcome,
    encode,
)
from kvferry.engine.rank_store import first_store

OPERATION_S = 30.0
"""A rank that takes part in nothing for so long is lost."""
JOIN_S = 10.0
"""Of the threads, at the end."""


class RankGroup:
    """``size`` ranks, this process being rank 0. Listens on the loopback interface at once."""

    def __init__(self, size: int, secret: str, incarnation: Incarnation | None = None) -> None:
        self.size = size
        self.incarnation = incarnation or new_incarnation()
        self.store = first_store(OPERATION_S)
        """By which the process group is made."""
        self.on_event: Callable[[int, bytes], None] = _nobody_listens
        """(rank, payload): what a rank's KV plane says. Called on that rank's thread."""
        self.on_lost: Callable[[str], None] = lambda why: None
        """Called once, on some thread, when a rank is gone before ``close``."""
        self.abort: Callable[[], None] = lambda: None
        """Ends what the ranks do together: rank 0 may be waiting for one that is gone."""
        self._listener = RankListener(secret, OPERATION_S)
        self._channels: dict[int, RankChannel] = {}
        self._threads: list[threading.Thread] = []
        self._ready: queue.SimpleQueue[tuple[int, Ready | RankLost]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.why_lost: str | None = None
        """Once a rank is gone."""
        self._is_closing = False

    @property
    def port(self) -> int:
        """Where the other ranks come in."""
        return self._listener.port

    def join_all(self, timeout_s: float) -> None:
        """Wait until all have come. Raises RankLost."""
        until_s = time.monotonic() + timeout_s
        try:
            while len(self._channels) < self.size - 1:
                channel = self._listener.accept(max(0.001, until_s - time.monotonic()))
                if channel is not None:
                    self._adopt(channel)
        except TimeoutError:
            missing = self.size - 1 - len(self._channels)
            raise RankLost(f"{missing} ranks did not come within {timeout_s:.0f} s") from None
        finally:
            self._listener.close()
        for rank, channel in self._channels.items():
            name = f"rank-{rank}"
            thread = threading.Thread(target=self._read, args=(rank, channel), name=name)
            self._threads.append(thread)
            thread.start()

    def wait_ready(self, timeout_s: float) -> list[tuple[str, ...]]:
        """Where the ranks from 1 on receive KV, once all have loaded. Raises RankLost."""
        endpoints: dict[int, tuple[str, ...]] = {}
        while len(endpoints) < self.size - 1:
            try:
                rank, ready = self._ready.get(timeout=timeout_s)
            except queue.Empty:
                raise RankLost(f"a rank was not ready within {timeout_s:.0f} s") from None
            if isinstance(ready, RankLost):
                raise ready
            endpoints[rank] = ready.endpoints
        return [endpoints[rank] for rank in range(1, self.size)]

    def send(self, message: Message) -> None:
        """To all other ranks. Raises RankLost."""
        frame = encode(message)
        if self.why_lost is not None:
            raise RankLost(self.why_lost)
        for channel in self._channels.values():
            channel.send_encoded(frame)

    def close(self) -> None:
        """Tell the ranks to end. Raises TimeoutError when a thread does not."""
        with self._lock:
            self._is_closing = True
        self._listener.close()
        for channel in self._channels.values():
            with contextlib.suppress(RankLost):  # it is gone already
                channel.send(Stop())
            channel.close()
        for thread in self._threads:
            thread.join(JOIN_S)
            if thread.is_alive():
                raise TimeoutError(f"thread {thread.name} does not end")

    def _adopt(self, channel: RankChannel) -> None:
        join = channel.receive()
        if not isinstance(join, Join) or join.rank not in range(1, self.size):
            raise ProtocolError("between ranks: whoever came is none of them")
        self._channels[join.rank] = channel
        channel.send(Welcome(self.incarnation))

    def _read(self, rank: int, channel: RankChannel) -> None:
        try:
            while True:
                self._handle(rank, channel, channel.receive())
        except Exception as error:  # a defect here must not leave a rank unheard
            self._lose(rank, f"rank {rank}: {error}")

    def _handle(self, rank: int, channel: RankChannel, message: Message) -> None:
        match message:
            case Put(key, value):
                self.store.set(key, value)
            case Get(key):
                channel.send(Value(self.store.get(key)))
            case Ready():
                self._ready.put((rank, message))
            case Event(payload):
                self.on_event(rank, payload)
            case Fault(reason):
                raise RankLost(reason)
            case _:
                raise ProtocolError(f"between ranks: {type(message).__name__} is rank 0's to say")

    def _lose(self, rank: int, why: str) -> None:
        with self._lock:
            if self._is_closing or self.why_lost is not None:
                return
            self.why_lost = why
        self.abort()
        self._ready.put((rank, RankLost(why)))
        self.on_lost(why)


def _nobody_listens(rank: int, payload: bytes) -> None:
    raise ProtocolError(f"rank {rank} has no KV plane")
