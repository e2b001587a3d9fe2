"""The receiver's end of a tcp data path: see ``tcp_streams``."""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kernels.kv_pack.progress import Stream
from kvferry.kv_transfer.transports.tcp_streams import FRAME, TcpPath, tune

_DROPPED_AT_ONCE = 256 << 10


@dataclass(slots=True)
class _Grant:
    """What a slab may take in."""

    number: int
    nbytes: int = 0
    """Said to come."""
    stream: Stream | None = None
    """What they come over, once they do."""

    @property
    def has_landed(self) -> bool:
        return self.stream is not None and self.stream.moved == self.nbytes


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

    def progress(self, slab: int, grant: int, nbytes: int) -> Stream | None:
        """Once the slab is the next on a stream."""
        granted = self._grants[slab]
        if granted is None or granted.number != grant:
            return None
        self._look(lambda: granted.stream is not None)
        return granted.stream if granted.nbytes == nbytes and not granted.has_landed else None

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        self._check()
        granted = self._grants[slab]
        if granted is None or granted.number != grant:
            return False
        self._look(lambda: granted.has_landed)
        self._check()
        if granted.has_landed and granted.nbytes != nbytes:
            raise LinkLost(f"the data path broke: {granted.nbytes} bytes instead of {nbytes}")
        return granted.has_landed

    def close(self) -> None:
        self._on_close()
        super().close()
        for sock in self._joining:
            sock.close()

    def admit(self, slab: int, number: int, nbytes: int, stream: Stream) -> _Grant | None:
        """What the bytes of a slab come under; None: they are of no use any more.

        Raises ProtocolError for what was never granted.
        """
        if slab >= len(self._grants) or not 0 < nbytes <= self._slab_bytes:
            raise ProtocolError(f"{nbytes} bytes for slab {slab}")
        granted = self._grants[slab]
        if granted is None or number > granted.number:
            raise ProtocolError(f"slab {slab} was not granted under {number}")
        if number < granted.number or granted.stream is not None:
            return None
        granted.nbytes, granted.stream = nbytes, stream
        return granted

    def takes(self, slab: int, grant: _Grant | None) -> bool:
        """Whether bytes under this grant still go into the slab."""
        return grant is not None and self._grants[slab] is grant

    def _look(self, is_done: Callable[[], bool]) -> None:
        """Take in what is there, of one stream after another."""
        self._join()
        for fd in tuple(self._streams):
            if not is_done():
                self.turn((fd,))

    def _join(self) -> None:
        while self._joining and self._broken is None:
            sock = self._joining.popleft()
            self._streams[sock.fileno()] = _Incoming(sock, self, Stream(sock.fileno()))
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
    stream: Stream
    """How many of ``nbytes`` have come; all of them inside a header."""
    head: bytearray = field(default_factory=bytearray)
    slab: int = 0
    grant: _Grant | None = None
    nbytes: int = 0

    def events(self) -> int:
        return select.POLLIN

    def move(self) -> bool:
        if self.stream.moved == self.nbytes and not self._move_head():
            return False
        self._move_body()
        return self.stream.moved == self.nbytes and self.grant is not None

    def _move_head(self) -> bool:
        """Whether it is whole."""
        head = self.sock.recv(FRAME.size - len(self.head))
        self._check(len(head))
        self.head += head
        if len(self.head) < FRAME.size:
            return False
        number, self.slab, self.nbytes = FRAME.unpack(self.head)
        self.head.clear()
        self.stream = Stream(self.sock.fileno())
        self.grant = self.inlet.admit(self.slab, number, self.nbytes, self.stream)
        return True

    def _move_body(self) -> None:
        begin = self.stream.moved
        if self.inlet.takes(self.slab, self.grant):
            received = self.sock.recv_into(self.inlet.slab(self.slab)[begin : self.nbytes])
        else:
            # Bytes under an older grant: its sender gave it back once its own kernel had them.
            received = len(self.sock.recv(min(self.nbytes - begin, _DROPPED_AT_ONCE)))
        self._check(received)
        self.stream.moved += received

    def _check(self, received: int) -> None:
        if not received:
            raise EOFError("the peer closed a stream")
