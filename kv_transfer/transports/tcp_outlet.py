"""The sender's end of a tcp data path: see ``tcp_streams``."""

from __future__ import annotations

import select
import socket
from collections import deque
from dataclasses import dataclass, field

from kvferry.kv_transfer.transports.tcp_streams import FRAME, TcpPath, tune


class TcpOutlet(TcpPath):
    """The sender's end."""

    def __init__(self, num_slabs: int, slab_bytes: int, socks: list[socket.socket]) -> None:
        """Takes ownership of the connections. Raises OSError when the peer is gone already."""
        super().__init__(num_slabs, slab_bytes)
        self._flying: set[int] = set()
        for sock in socks:
            tune(sock)
        self._outgoing = [_Outgoing(sock, self._flying) for sock in socks]
        self._streams.update((each.sock.fileno(), each) for each in self._outgoing)

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        self._check()
        stream = min(self._outgoing, key=lambda each: len(each.pushes))
        head, body = FRAME.pack(grant, slab, nbytes), self.slab(slab)[:nbytes]
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
