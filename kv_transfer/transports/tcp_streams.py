"""Slabs over TCP connections. The link's own thread moves them, in between and while it waits: what
it packs or scatters next is then still in its processor's cache, and nothing is handed over.

On a stream a slab is 20 bytes (grant: 8, slab: 4, number of bytes: 8; big-endian), then its bytes,
which go from slab memory to slab memory with no copy but the kernel's. What the header says is held
against what the inlet granted before the first byte is taken. Slabs go to whichever stream has the
fewest to send, and leave at once as far as the kernel takes them. A pack may send a slab while it
fills it, and a scatter take it in while it is written: then ``Stream`` says how far they have come.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
from collections.abc import Collection
from typing import Protocol

from kvferry.core.errors import LinkLost, ProtocolError

FRAME = struct.Struct("!QIQ")
_DEAD_AFTER_S = 10
"""A stream whose peer acknowledges nothing for so long is given up."""


class TcpStream(Protocol):
    """One connection of a path, not blocking."""

    sock: socket.socket

    def events(self) -> int:
        """After which there is something to move; 0: nothing to do."""
        ...

    def move(self) -> bool:
        """Move what can be moved now, up to the end of a slab. Whether that was reached.

        Raises OSError, EOFError, ProtocolError.
        """
        ...


class TcpPath:
    """One end: slabs of this process alone, and streams that all belong to the link's thread."""

    is_pulled = False
    is_device = False

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._bytes = memoryview(mmap.mmap(-1, num_slabs * slab_bytes, flags=flags))
        self._slab_bytes = slab_bytes
        self._streams: dict[int, TcpStream] = {}
        """By descriptor."""
        self._broken: str | None = None

    def slab(self, index: int) -> memoryview:
        return self._bytes[index * self._slab_bytes : (index + 1) * self._slab_bytes]

    def events(self) -> dict[socket.socket, int]:
        """After which ``turn`` has something to do."""
        events = {stream.sock: stream.events() for stream in self._streams.values()}
        return {sock: of_sock for sock, of_sock in events.items() if of_sock}

    def turn(self, ready: Collection[int]) -> bool:
        """Move what these descriptors can. Whether a slab has gone or come, or the path broken."""
        streams = [self._streams[fd] for fd in ready if fd in self._streams]
        return sum(map(self._move, streams)) > 0

    def close(self) -> None:
        self._break("closed")

    def _check(self) -> None:
        """Raises LinkLost when a stream broke."""
        if self._broken is not None:
            raise LinkLost(f"the data path broke: {self._broken}")

    def _move(self, stream: TcpStream) -> bool:
        if self._broken is not None:
            return True
        try:
            return stream.move()
        except BlockingIOError:
            return False
        except (OSError, EOFError, ProtocolError) as error:
            self._break(str(error))
            return True

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        for stream in self._streams.values():
            stream.sock.close()
        self._streams.clear()


def tune(sock: socket.socket) -> None:
    """Prompt, and watched by the kernel, which finds the size of its buffers. Raises OSError."""
    sock.setblocking(False)
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
        with contextlib.suppress(OSError):
            # No network, no congestion: and a scheme that paces halves the rate.
            sock.setsockopt(tcp, socket.TCP_CONGESTION, b"reno")
