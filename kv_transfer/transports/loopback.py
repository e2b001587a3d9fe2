"""Links within one process: frames in queues, slabs in a bytearray. The fake that tests and the
spine use.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kernels.kv_pack.progress import WORD_BYTES, progress_words
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.transports.shared_slabs import SharedSlabs

SCHEME = "loopback"
_numbers = itertools.count()
_listeners: dict[str, LoopbackListener] = {}
_listeners_lock = threading.Lock()


class LoopbackSlabs(SharedSlabs):
    """Slabs in one bytearray that both sides hold."""

    is_followed = True

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        self.shape = (num_slabs, slab_bytes)
        self._bytes = memoryview(bytearray(num_slabs * slab_bytes))
        self._words = progress_words(memoryview(bytearray(num_slabs * WORD_BYTES)))

    def slab(self, index: int) -> memoryview:
        slab_bytes = self.shape[1]
        return self._bytes[index * slab_bytes : (index + 1) * slab_bytes]

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return self._words[slab]

    def close(self) -> None:
        """Nothing to do: the bytes go with their last holder."""


class _Wire:
    """What the two sides of a link share; one condition guards all of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.closed = False
        self.slabs: LoopbackSlabs | None = None


class LoopbackChannel:
    """One side of a link."""

    transport = SCHEME

    def __init__(self, wire: _Wire, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self._wire, self._inbox, self._outbox = wire, inbox, outbox
        self._woken = False

    def send(self, frame: bytes, timeout_s: float) -> None:
        with self._wire.changed:
            if self._wire.closed:
                raise LinkLost("the peer closed the link")
            self._outbox.append(frame)
            self._wire.changed.notify_all()

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        wire = self._wire
        with wire.changed:
            wire.changed.wait_for(
                lambda: self._inbox or self._woken or wire.closed, max(0.0, timeout_s)
            )
            if self._inbox:
                frame = self._inbox.popleft()
                if not 0 < len(frame) <= limit:
                    raise ProtocolError(f"frame of {len(frame)} bytes; the limit is {limit}")
                return frame
            if wire.closed:
                raise LinkLost("the peer closed the link")
            self._woken = False
            return None

    def wake(self) -> None:
        with self._wire.changed:
            self._woken = True
            self._wire.changed.notify_all()

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> LoopbackSlabs:
        slabs = LoopbackSlabs(num_slabs, slab_bytes)
        with self._wire.changed:
            self._wire.slabs = slabs
            self._wire.changed.notify_all()
        return slabs

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> LoopbackSlabs:
        wire = self._wire
        with wire.changed:
            wire.changed.wait_for(lambda: wire.slabs is not None or wire.closed, timeout_s)
            if wire.slabs is None:
                raise LinkLost("the peer hands over no slab memory")
            if wire.slabs.shape != (num_slabs, slab_bytes):
                raise ProtocolError("the peer's slab memory is not what it announced")
            return wire.slabs

    def close(self) -> None:
        with self._wire.changed:
            self._wire.closed = True
            self._wire.changed.notify_all()


class LoopbackListener:
    """Listens on a fresh name of this process."""

    def __init__(self) -> None:
        self._name = f"{next(_numbers)}"
        self._changed = threading.Condition()
        self._waiting: deque[LoopbackChannel] = deque()
        self._closed = False
        with _listeners_lock:
            _listeners[self.endpoint] = self

    @property
    def endpoint(self) -> str:
        return f"{SCHEME}:{self._name}"

    def dial(self) -> LoopbackChannel:
        """The other side's end of a new link."""
        wire, there, back = _Wire(), deque[bytes](), deque[bytes]()
        with self._changed:
            if self._closed:
                raise LinkRefused(f"nobody listens at {self.endpoint}")
            self._waiting.append(LoopbackChannel(wire, inbox=there, outbox=back))
            self._changed.notify_all()
        return LoopbackChannel(wire, inbox=back, outbox=there)

    def accept(self, timeout_s: float) -> LoopbackChannel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed, timeout_s)
            return self._waiting.popleft() if self._waiting else None

    def stop(self) -> None:
        self.close()

    def close(self) -> None:
        with _listeners_lock:
            _listeners.pop(self.endpoint, None)
        with self._changed:
            self._closed = True
            for channel in self._waiting:
                channel.close()
            self._waiting.clear()
            self._changed.notify_all()


def connect_loopback(endpoint: str, timeout_s: float) -> LoopbackChannel:
    """Open a link to a LoopbackListener of this process. Raises LinkRefused."""
    with _listeners_lock:
        listener = _listeners.get(endpoint)
    if listener is None:
        raise LinkRefused(f"nobody listens at {endpoint}")
    return listener.dial()
