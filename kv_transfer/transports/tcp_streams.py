"""Slabs over TCP connections. The link's own thread moves them, in between and while it waits: what
it packs or scatters next is then still in its processor's cache, and nothing is handed over.

On a stream a slab is 20 bytes (grant: 8, slab: 4, number of bytes: 8; big-endian), then its bytes,
which go from slab memory to slab memory with no copy but the kernel's. What the header says is held
against what the inlet granted before the first byte is taken. Slabs go to whichever stream has the
fewest to send, and leave at once as far as the kernel takes them.
"""

from __future__ import annotations

import contextlib
import mmap
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from kvferry.core.errors import LinkLost, ProtocolError

_FRAME = struct.Struct("!QIQ")
_DROPPED_AT_ONCE = 256 << 10
_DEAD_AFTER_S = 10
"""A stream whose peer acknowledges nothing for so long is given up."""


class _Stream(Protocol):
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


class _Path:
    """One end: slabs of this process alone, and streams that all belong to the link's thread."""

    is_pulled = False
    is_device = False

    def __init__(self, num_slabs: int, slab_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._bytes = memoryview(mmap.mmap(-1, num_slabs * slab_bytes, flags=flags))
        self._slab_bytes = slab_bytes
        self._streams: dict[int, _Stream] = {}
        """By descriptor."""
        self._broken: str | None = None

    def slab(self, index: int) -> memoryview:
        return self._bytes[index * self._slab_bytes : (index + 1) * self._slab_bytes]

    def progress(self, slab: int) -> memoryview | None:
        """Nothing is shared."""
        return None

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

    def _move(self, stream: _Stream) -> bool:
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


class TcpOutlet(_Path):
    """The sender's end."""

    def __init__(self, num_slabs: int, slab_bytes: int, socks: list[socket.socket]) -> None:
        """Takes ownership of the connections. Raises OSError when the peer is gone already."""
        super().__init__(num_slabs, slab_bytes)
        self._flying: set[int] = set()
        for sock in socks:
            _tune(sock)
        self._outgoing = [_Outgoing(sock, self._flying) for sock in socks]
        self._streams.update((each.sock.fileno(), each) for each in self._outgoing)

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._check()
        stream = min(self._outgoing, key=lambda each: len(each.pushes))
        head, body = _FRAME.pack(grant, slab, nbytes), self.slab(slab)[:nbytes]
        stream.pushes.append(_Push(slab, [memoryview(head), body]))
        self._flying.add(slab)
        if len(stream.pushes) == 1:
            self._move(stream)

    def in_flight(self, slab: int) -> bool:
        self._check()
        if slab in self._flying:
            self.turn(tuple(self._streams))
            self._check()
        return slab in self._flying


@dataclass(frozen=True, slots=True)
class _Push:
    slab: int
    rest: list[memoryview]
    """What the kernel has not taken yet."""


@dataclass(slots=True)
class _Outgoing:
    """A stream of an outlet."""

    sock: socket.socket
    flying: set[int]
    """Slabs that have not left, of all streams."""
    pushes: deque[_Push] = field(default_factory=deque)

    def events(self) -> int:
        return select.POLLOUT if self.pushes else 0

    def move(self) -> bool:
        if not self.pushes:
            return False
        rest = self.pushes[0].rest
        sent = self.sock.sendmsg(rest)
        while rest and sent >= len(rest[0]):
            sent -= len(rest.pop(0))
        if rest:
            rest[0] = rest[0][sent:]
            return False
        self.flying.discard(self.pushes.popleft().slab)
        return True


@dataclass(slots=True)
class _Grant:
    """What a slab may take in."""

    number: int
    has_begun: bool = False
    landed: int | None = None
    """Bytes that have come, once they have."""


class TcpInlet(_Path):
    """The receiver's end. Streams join it as they come."""

    def __init__(
        self,
        num_slabs: int,
        slab_bytes: int,
        wake: Callable[[], None],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(num_slabs, slab_bytes)
        self._wake = wake
        self._on_close = on_close
        self._grants: list[_Grant | None] = [None] * num_slabs
        self._joining: deque[socket.socket] = deque()

    def attach(self, sock: socket.socket) -> None:
        """Serve one more stream. Takes ownership. Any thread may call it."""
        self._joining.append(sock)
        self._wake()

    def events(self) -> dict[socket.socket, int]:
        self._join()
        return super().events()

    def grant(self, slab: int, grant: int) -> None:
        self._grants[slab] = _Grant(grant)

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        raise ProtocolError("tcp is not pulled")

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        self._check()
        granted = self._grants[slab]
        if granted is None or granted.number != grant:
            return False
        self._join()
        for fd in tuple(self._streams):
            if granted.landed is None:
                self.turn((fd,))
        self._check()
        if granted.landed not in (None, nbytes):
            raise LinkLost(f"the data path broke: {granted.landed} bytes instead of {nbytes}")
        return granted.landed is not None

    def close(self) -> None:
        self._on_close()
        super().close()
        for sock in self._joining:
            sock.close()

    def admit(self, slab: int, number: int, nbytes: int) -> _Grant | None:
        """What the bytes of a slab come under; None: they are of no use any more.

        Raises ProtocolError for what was never granted.
        """
        if slab >= len(self._grants) or not 0 < nbytes <= self._slab_bytes:
            raise ProtocolError(f"{nbytes} bytes for slab {slab}")
        granted = self._grants[slab]
        if granted is None or number > granted.number:
            raise ProtocolError(f"slab {slab} was not granted under {number}")
        if number < granted.number or granted.has_begun:
            return None
        granted.has_begun = True
        return granted

    def takes(self, slab: int, grant: _Grant | None) -> bool:
        """Whether bytes under this grant still go into the slab."""
        return grant is not None and self._grants[slab] is grant

    def _join(self) -> None:
        while self._joining and self._broken is None:
            sock = self._joining.popleft()
            self._streams[sock.fileno()] = _Incoming(sock, self)
            try:
                _tune(sock)
            except OSError as error:
                # The peer is gone already.
                self._break(str(error))
                self._wake()


@dataclass(slots=True)
class _Incoming:
    """A stream of an inlet: inside a header, or inside the bytes that follow it."""

    sock: socket.socket
    inlet: TcpInlet
    head: bytearray = field(default_factory=bytearray)
    slab: int = 0
    grant: _Grant | None = None
    nbytes: int = 0
    left: int = 0
    """Of ``nbytes``; 0 inside a header."""

    def events(self) -> int:
        return select.POLLIN

    def move(self) -> bool:
        if not self.left:
            head = self.sock.recv(_FRAME.size - len(self.head))
            self._check(len(head))
            self.head += head
            if len(self.head) < _FRAME.size:
                return False
            number, self.slab, self.nbytes = _FRAME.unpack(self.head)
            self.head.clear()
            self.grant = self.inlet.admit(self.slab, number, self.nbytes)
            self.left = self.nbytes
        return self._move_body()

    def _move_body(self) -> bool:
        if self.inlet.takes(self.slab, self.grant):
            rest = self.inlet.slab(self.slab)[self.nbytes - self.left : self.nbytes]
            received = self.sock.recv_into(rest)
        else:
            # Bytes under an older grant: its sender gave it back once its own kernel had them.
            received = len(self.sock.recv(min(self.left, _DROPPED_AT_ONCE)))
        self._check(received)
        self.left -= received
        if self.left or self.grant is None:
            return False
        self.grant.landed = self.nbytes
        return True

    def _check(self, received: int) -> None:
        if not received:
            raise EOFError("the peer closed a stream")


def _tune(sock: socket.socket) -> None:
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
