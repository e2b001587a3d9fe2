"""Both ends of a tcp link in one process, and a sender that follows no rules."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec
from strangers import open_socket

from kvferry.kv_transfer.endpoints import ListenOptions, connect, listen
from kvferry.kv_transfer.transports.tcp import TcpChannel
from kvferry.kv_transfer.transports.tcp_listener import DATA, TcpListener

SLAB = 300 << 10
SLABS = 4
FRAME = struct.Struct("!QIQ")


def eventually(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class TcpLink:
    """Both ends of a link in this process."""

    def __init__(self, host: str = "127.0.0.1", streams: int = 2) -> None:
        self.listener = listen("tcp", ListenOptions(host=host, streams=streams))
        assert isinstance(self.listener, TcpListener)
        self.sender = connect(self.listener.endpoint, 5.0)
        receiver = self.listener.accept(5.0)
        assert isinstance(receiver, TcpChannel)
        self.receiver = receiver
        self.inlet = receiver.open_inlet(SLABS, SLAB, 5.0)

    def open(self) -> TcpLink:
        self.outlet = self.sender.open_outlet(SLABS, SLAB, 5.0)
        return self

    def open_raw(self) -> TcpLink:
        """A sender that follows no rules."""
        frame = self.sender.receive(5.0)
        assert frame is not None
        self.token, self.streams = msgspec.msgpack.decode(
            frame, type=tuple[bytes, int], strict=True
        )
        return self

    def stream(self, greeting: bytes | None = None) -> socket.socket:
        """A data stream, or what says that it is one."""
        return open_socket(
            self.listener.endpoint, DATA + self.token if greeting is None else greeting
        )

    def close(self) -> None:
        if hasattr(self, "outlet"):
            self.outlet.close()
        for each in (self.sender, self.inlet, self.receiver, self.listener):
            each.close()


def has_arrived(link: TcpLink, slab: int, grant: int, nbytes: int) -> Callable[[], bool]:
    return lambda: link.inlet.arrived(slab, grant, nbytes)
