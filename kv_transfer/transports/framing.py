"""Length-prefixed frames over a stream socket, with a deadline on every wait.

A frame is four bytes of length, big-endian, then the bytes. Before ``read_ahead`` never more than
one frame is read from the socket: what follows it (a file descriptor, say) stays for whoever reads
next.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.messages import MAX_FRAME

AHEAD = 1 << 16
"""Bytes that are read at once, where they may be."""
CROWDED_S = 3e-5
"""Who looks for something and gets no turn for so long keeps others from theirs."""
_LENGTH = struct.Struct("!I")


class Wakeup:
    """Cuts a wait for a socket short, from any thread, even before it begins."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        self._poll = select.poll()
        """Of one socket, the last one waited for, and the event."""
        self._polled: socket.socket | None = None

    def set(self) -> None:
        """Legal after close."""
        # The lock keeps the number of a closed descriptor, by now perhaps another file's, from
        # being written.
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._event, 1)

    def wait_readable(self, sock: socket.socket, timeout_s: float, awake_s: float = 0.0) -> bool:
        """Wait until there is something to read, so long awake; True when a ``set`` cut the wait
        short.
        """
        if sock is not self._polled:
            self._poll, self._polled = self._polling({sock: select.POLLIN}), sock
        if self._look(self._poll, min(timeout_s, awake_s)):
            timeout_s = 0.0
        return self._wait(self._poll, timeout_s) is None

    def wait_any(self, events: Mapping[socket.socket, int], timeout_s: float) -> list[int] | None:
        """Descriptors at which an event that was waited for has come, none after ``timeout_s``;
        None when a ``set`` cut the wait short.
        """
        return self._wait(self._polling(events), timeout_s)

    def _polling(self, events: Mapping[socket.socket, int]) -> select.poll:
        poll = select.poll()
        for sock, of_sock in events.items():
            poll.register(sock, of_sock)
        poll.register(self._event, select.POLLIN)
        return poll

    def _look(self, poll: select.poll, for_s: float) -> bool:
        """Whether something has come. Gives up when others want the processor or interpreter."""
        now = time.perf_counter()
        end = now + for_s
        while now < end:
            if poll.poll(0):
                return True
            os.sched_yield()
            before, now = now, time.perf_counter()
            if now - before > CROWDED_S:
                return False
        return False

    def _wait(self, poll: select.poll, timeout_s: float) -> list[int] | None:
        ready = [fd for fd, _ in poll.poll(max(0, math.ceil(timeout_s * 1000)))]
        if self._event in ready:
            with self._lock:
                if not self._closed:
                    os.eventfd_read(self._event)
            return None
        return ready

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._event)


class FrameSocket:
    """Frames over one connected socket, which it owns.

    ``frame_timeout_s``: longest wait inside a frame. ``awake_s``: how long a wait does not sleep,
    as long as nobody else wants the processor: to be woken takes as long as to copy 500 KiB.
    """

    def __init__(
        self, sock: socket.socket, frame_timeout_s: float = 5.0, awake_s: float = 0.0
    ) -> None:
        """Raises LinkLost, with the socket closed, when the system has no descriptor left."""
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._wakeup = Wakeup()
        except OSError as error:
            sock.close()
            raise LinkLost(f"no link can be had: {error.strerror}") from None
        self._sock = sock
        self._frame_timeout_s = frame_timeout_s
        self._awake_s = awake_s
        self._part = bytearray()
        self._is_ahead = False
        self._part_since = 0.0

    @property
    def sock(self) -> socket.socket:
        return self._sock

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Raises LinkLost, ProtocolError for a frame that no peer would take."""
        if len(frame) > MAX_FRAME:
            raise ProtocolError(f"frame of {len(frame)} bytes is above the limit of {MAX_FRAME}")
        deadline = time.monotonic() + timeout_s
        rest = memoryview(_LENGTH.pack(len(frame)) + frame)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                if not self.wait_for(select.POLLOUT, deadline - time.monotonic()):
                    raise LinkLost("the peer takes no messages") from None
            except OSError as error:
                raise LinkLost(f"the link broke: {error.strerror}") from None

    def read_ahead(self) -> None:
        """From now on nobody but this reads from the socket, so that several frames may be read at
        once.
        """
        self._is_ahead = True

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        """The next frame; None after ``timeout_s`` or a wake. Raises LinkLost, ProtocolError."""
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._advance(limit)
            if frame is not None:
                return frame
            now = time.monotonic()
            wait_s = deadline - now
            if self._part:
                left_s = self._part_since + self._frame_timeout_s - now
                if left_s <= 0:
                    raise LinkLost("the peer stopped inside a message")
                wait_s = min(wait_s, left_s)
            if wait_s <= 0 or self._wakeup.wait_readable(self._sock, wait_s, self._awake_s):
                return None

    def _advance(self, limit: int) -> bytes | None:
        """The next frame, if it is here."""
        while True:
            missing = self._missing(limit)
            if missing <= 0:
                return self._take()
            try:
                data = self._sock.recv(AHEAD if self._is_ahead else missing)
            except BlockingIOError:
                return None
            except OSError as error:
                raise LinkLost(f"the link broke: {error.strerror}") from None
            if not data:
                raise LinkLost("the peer closed the link")
            if not self._part:
                self._part_since = time.monotonic()
            self._part += data

    def _missing(self, limit: int) -> int:
        """Bytes up to the end of the length, or else of the frame."""
        have = len(self._part)
        if have < _LENGTH.size:
            return _LENGTH.size - have
        (length,) = _LENGTH.unpack_from(self._part)
        if not 0 < length <= limit:
            raise ProtocolError(f"frame of {length} bytes; the limit is {limit}")
        return _LENGTH.size + int(length) - have

    def _take(self) -> bytes:
        """The frame that the buffer begins with."""
        end = _LENGTH.size + _LENGTH.unpack_from(self._part)[0]
        frame = bytes(memoryview(self._part)[_LENGTH.size : end])
        del self._part[:end]
        if self._part:
            self._part_since = time.monotonic()
        return frame

    def wait_any(self, events: Mapping[socket.socket, int], timeout_s: float) -> list[int] | None:
        """Wait for more of a frame, or for events of other sockets: see ``Wakeup``."""
        return self._wakeup.wait_any({self._sock: select.POLLIN, **events}, timeout_s)

    def wait_for(self, events: int, timeout_s: float) -> bool:
        """Whether the socket became ready within the time."""
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(0, math.ceil(timeout_s * 1000))))

    def wake(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._sock.close()
        self._wakeup.close()
