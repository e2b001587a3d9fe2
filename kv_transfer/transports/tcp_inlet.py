"""The receiver's end of a tcp data path: see ``tcp_streams``."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.transports.tcp_streams import FRAME, TcpPath, tune

_DROPPED_AT_ONCE = 256 << 10


@dataclass(slots=True)
class _Grant:
    """What a slab may take in."""

    number: int
    has_begun: bool = False
    landed: int | None = None
    """Bytes that have come, once they have."""


class TcpInlet(TcpPath):
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
                tune(sock)
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
            head = self.sock.recv(FRAME.size - len(self.head))
            self._check(len(head))
            self.head += head
            if len(self.head) < FRAME.size:
                return False
            number, self.slab, self.nbytes = FRAME.unpack(self.head)
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
