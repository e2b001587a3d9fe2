"""Slabs over TCP connections: one thread per connection and side, each blocked in the kernel.

On a stream a slab is 20 bytes (grant: 8, slab: 4, number of bytes: 8; big-endian), then its bytes,
which go from slab memory to slab memory with no copy but the kernel's. What the header says is held
against what the inlet granted before the first byte is taken. Slabs go to whichever stream is free.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import socket
import struct
import threading
from collections.abc import Callable

from kvferry.core.errors import LinkLost, ProtocolError

_FRAME = struct.Struct("!QIQ")
_SCRATCH_BYTES = 256 << 10
_DEAD_AFTER_S = 10
"""A stream whose peer acknowledges nothing for so long is given up."""
_LOCAL_BUFFER = 256 << 10
"""Socket buffers within one host: what waits in them is still in the cache when it is read. Between
hosts the kernel finds the size for itself, up to ``net.ipv4.tcp_[rw]mem``."""


class _Memory:
    """Slabs of this process alone."""

    is_pulled = False
    is_device = False

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._bytes = memoryview(mmap.mmap(-1, num_slabs * slab_bytes, flags=flags))
        self._num_slabs = num_slabs
        self._slab_bytes = slab_bytes

    def slab(self, index: int) -> memoryview:
        return self._bytes[index * self._slab_bytes : (index + 1) * self._slab_bytes]


class _Streams:
    """The threads and connections of one end, and why they broke."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.changed = threading.Condition()
        self.broken: str | None = None
        self._socks: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def start(self, sock: socket.socket, work: Callable[[socket.socket], None], name: str) -> None:
        """Run ``work`` over a connection on a thread, until it raises. Takes ownership."""
        thread = threading.Thread(target=self._run, args=(work, sock), name=name)
        try:
            _tune(sock)
            with self.changed:
                if self.broken is None:
                    thread.start()
                    self._socks.append(sock)
                    self._threads.append(thread)
                    return
        except (OSError, RuntimeError) as error:
            # The peer is gone already, or there is no thread to be had.
            self.stop(str(error))
            self.wake()
        sock.close()

    def check(self) -> None:
        """Raises LinkLost when a stream broke."""
        if self.broken is not None:
            raise LinkLost(f"the data path broke: {self.broken}")

    def stop(self, reason: str) -> None:
        """End all streams, which wakes whoever is blocked in one."""
        with self.changed:
            if self.broken is None:
                self.broken = reason
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self.changed.notify_all()

    def join(self) -> None:
        """After ``stop``: no thread touches a slab any more."""
        for thread in self._threads:
            thread.join()
        for sock in self._socks:
            sock.close()

    def _run(self, work: Callable[[socket.socket], None], sock: socket.socket) -> None:
        try:
            work(sock)
        except (OSError, EOFError, ProtocolError) as error:
            self.stop(str(error))
            self.wake()


class TcpOutlet(_Memory):
    """The sender's end."""

    def __init__(
        self,
        num_slabs: int,
        slab_bytes: int,
        socks: list[socket.socket],
        wake: Callable[[], None],
    ) -> None:
        """Takes ownership of the connections."""
        super().__init__(num_slabs, slab_bytes)
        self._streams = _Streams(wake)
        self._num_streams = len(socks)
        self._jobs: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._flying: set[int] = set()
        for sock in socks:
            self._streams.start(sock, self._work, "kv-tcp-outlet")

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._streams.check()
        self._flying.add(slab)
        self._jobs.put((slab, grant, nbytes))

    def progress(self, slab: int) -> memoryview | None:
        return None

    def in_flight(self, slab: int) -> bool:
        self._streams.check()
        return slab in self._flying

    def close(self) -> None:
        self._streams.stop("closed")
        for _ in range(self._num_streams):
            self._jobs.put(None)
        self._streams.join()

    def _work(self, sock: socket.socket) -> None:
        while (job := self._jobs.get()) is not None:
            slab, grant, nbytes = job
            head, body = _FRAME.pack(grant, slab, nbytes), self.slab(slab)[:nbytes]
            sent = sock.sendmsg([head, body])
            if sent < len(head):
                sock.sendall(head[sent:])
                sent = len(head)
            if sent < len(head) + nbytes:
                sock.sendall(body[sent - len(head) :])
            self._flying.discard(slab)
            self._streams.wake()


class TcpInlet(_Memory):
    """The receiver's end. Streams join it as they come."""

    def __init__(
        self,
        num_slabs: int,
        slab_bytes: int,
        wake: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(num_slabs, slab_bytes)
        self._streams = _Streams(wake)
        self._on_close = on_close
        self._granted: list[int | None] = [None] * num_slabs
        self._landed: list[int | None] = [None] * num_slabs
        """Bytes that came under the grant."""
        self._busy: set[int] = set()
        """Slabs that a stream writes to."""

    def attach(self, sock: socket.socket) -> None:
        """Serve one more stream. Takes ownership."""
        self._streams.start(sock, self._work, "kv-tcp-inlet")

    def grant(self, slab: int, grant: int) -> None:
        with self._streams.changed:
            self._granted[slab], self._landed[slab] = grant, None

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        raise ProtocolError("tcp is not pulled")

    def progress(self, slab: int) -> memoryview | None:
        return None

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        self._streams.check()
        with self._streams.changed:
            landed = self._landed[slab] if self._granted[slab] == grant else None
        if landed not in (None, nbytes):
            raise LinkLost(f"the data path broke: {landed} bytes instead of {nbytes}")
        return landed is not None

    def close(self) -> None:
        self._on_close()
        self._streams.stop("closed")
        self._streams.join()

    def _work(self, sock: socket.socket) -> None:
        head = memoryview(bytearray(_FRAME.size))
        while True:
            _receive(sock, head)
            grant, slab, nbytes = _FRAME.unpack(head)
            if not self._admit(slab, grant, nbytes):
                _drain(sock, nbytes)
                continue
            _receive(sock, self.slab(slab)[:nbytes])
            self._leave(slab, grant, nbytes)
            self._streams.wake()

    def _admit(self, slab: int, grant: int, nbytes: int) -> bool:
        """Whether the bytes go into the slab; False: they are of no use any more.

        Raises ProtocolError for what was never granted.
        """
        if slab >= len(self._granted) or not 0 < nbytes <= self._slab_bytes:
            raise ProtocolError(f"{nbytes} bytes for slab {slab}")
        with self._streams.changed:
            # Bytes under an older grant may still be on their way in when the next is given:
            # the sender is done with a slab once its kernel has taken the bytes.
            self._streams.changed.wait_for(
                lambda: slab not in self._busy or self._streams.broken is not None
            )
            granted = self._granted[slab]
            if granted is None or grant > granted:
                raise ProtocolError(f"slab {slab} was not granted under {grant}")
            if grant < granted or self._landed[slab] is not None:
                return False
            self._busy.add(slab)
            return True

    def _leave(self, slab: int, grant: int, nbytes: int) -> None:
        with self._streams.changed:
            self._busy.discard(slab)
            if self._granted[slab] == grant:
                self._landed[slab] = nbytes
            self._streams.changed.notify_all()


def _tune(sock: socket.socket) -> None:
    """Blocking, prompt, and watched by the kernel. Raises OSError."""
    sock.settimeout(None)
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _DEAD_AFTER_S // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, _DEAD_AFTER_S // 2),
        (socket.TCP_USER_TIMEOUT, 1000 * _DEAD_AFTER_S),
    ):
        sock.setsockopt(tcp, option, value)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, _LOCAL_BUFFER)
        with contextlib.suppress(OSError):
            # No network, no congestion: and a scheme that paces halves the rate.
            sock.setsockopt(tcp, socket.TCP_CONGESTION, b"reno")


def _receive(sock: socket.socket, into: memoryview) -> None:
    """Fill the view. Raises OSError, EOFError."""
    while into:
        received = sock.recv_into(into, 0, socket.MSG_WAITALL)
        if not received:
            raise EOFError("the peer closed a stream")
        into = into[received:]


def _drain(sock: socket.socket, nbytes: int) -> None:
    scratch = memoryview(bytearray(min(nbytes, _SCRATCH_BYTES)))
    while nbytes:
        part = scratch[:nbytes]
        _receive(sock, part)
        nbytes -= len(part)
