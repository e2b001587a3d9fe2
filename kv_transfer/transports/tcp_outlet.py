"""The sender's end of a tcp data path: see ``tcp_streams``."""

from __future__ import annotations

import select
import socket
from collections import deque
from dataclasses import dataclass, field

from kvferry.kernels.kv_pack.progress import Stream
from kvferry.kv_transfer.transports.tcp_streams import FRAME, TcpPath, tune


class TcpOutlet(TcpPath):
    """The sender's end."""

    is_followed = True

    def __init__(self, num_slabs: int, slab_bytes: int, socks: list[socket.socket]) -> None:
        """Takes ownership of the connections. Raises OSError when the peer is gone already."""
        super().__init__(num_slabs, slab_bytes)
        self._flying: dict[int, _Outgoing] = {}
        """Slabs that have not left."""
        for sock in socks:
            tune(sock)
        self._outgoing = [_Outgoing(sock, self._flying) for sock in socks]
        self._streams.update((each.sock.fileno(), each) for each in self._outgoing)

    def progress(self, slab: int, grant: int, nbytes: int) -> Stream | None:
        """Not while every stream has something to send."""
        self._check()
        if all(each.pushes for each in self._outgoing):
            return None
        stream = self._begin(slab, grant, nbytes)
        try:
            return stream.open()
        except BlockingIOError:
            pass
        except OSError as error:
            self._break(str(error))
            self._check()
        return None

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._check()
        stream = self._flying.get(slab) or self._begin(slab, grant, nbytes)
        if stream.pushes[0].slab == slab:
            self._move(stream)

    def in_flight(self, slab: int) -> bool:
        self._check()
        if slab in self._flying:
            self.turn(tuple(self._streams))
            self._check()
        return slab in self._flying

    def _begin(self, slab: int, grant: int, nbytes: int) -> _Outgoing:
        """Put a slab in line."""
        stream = min(self._outgoing, key=lambda each: len(each.pushes))
        head, body = FRAME.pack(grant, slab, nbytes), self.slab(slab)[:nbytes]
        stream.pushes.append(_Push(slab, memoryview(head), body, Stream(stream.sock.fileno())))
        self._flying[slab] = stream
        return stream


@dataclass(slots=True)
class _Push:
    slab: int
    head: memoryview
    """What of it the kernel has not taken yet."""
    body: memoryview
    stream: Stream
    """How much of the body the kernel has taken."""


@dataclass(slots=True)
class _Outgoing:
    """A stream of an outlet."""

    sock: socket.socket
    flying: dict[int, _Outgoing]
    """Slabs that have not left, of all streams."""
    pushes: deque[_Push] = field(default_factory=deque)

    def events(self) -> int:
        return select.POLLOUT if self.pushes else 0

    def open(self) -> Stream | None:
        """Send the head of the only push, so that its body may follow; None when it did not leave
        as a whole. Raises OSError.
        """
        push = self.pushes[0]
        push.head = push.head[self.sock.send(push.head) :]
        return None if push.head else push.stream

    def move(self) -> bool:
        if not self.pushes:
            return False
        push = self.pushes[0]
        sent = self.sock.sendmsg([push.head, push.body[push.stream.moved :]])
        of_head = min(sent, len(push.head))
        push.head = push.head[of_head:]
        push.stream.moved += sent - of_head
        if push.stream.moved < len(push.body):
            return False
        del self.flying[self.pushes.popleft().slab]
        return True
