"""Links between hosts: control and slabs over TCP, all to the one port that the receiver listens
on. See ``tcp_listener`` for how a connection begins and ``tcp_streams`` for how slabs move.
"""

from __future__ import annotations

import secrets
import socket
import time
from typing import Annotated

import msgspec

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.transports.control import SocketChannel, bind_tcp, dial, dial_tcp
from kvferry.kv_transfer.transports.tcp_inlet import TcpInlet
from kvferry.kv_transfer.transports.tcp_listener import CONTROL, DATA, TOKEN_BYTES, TcpListener
from kvferry.kv_transfer.transports.tcp_outlet import TcpOutlet

SCHEME = "tcp"
MAX_STREAMS = 64
_SETUP_LIMIT = 256


class _Setup(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Receiver to sender, once, over the control channel: dial so many streams with this token."""

    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]


_decoder = msgspec.msgpack.Decoder(_Setup)


class TcpChannel(SocketChannel):
    """One side of a link."""

    transport = SCHEME

    def __init__(
        self, sock: socket.socket, listener: TcpListener | None = None, streams: int = 1
    ) -> None:
        """``listener``: where the streams will come in, on the receiver's side."""
        super().__init__(sock)
        self._listener = listener
        self._streams = streams
        self._path: TcpInlet | TcpOutlet | None = None

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        """Slabs move meanwhile; one that has gone or come cuts the wait short as a wake does."""
        path = self._path
        if path is None:
            return super().receive(timeout_s, limit)
        deadline = time.monotonic() + timeout_s
        has_moved = False
        while True:
            frame = super().receive(0.0, limit)
            left_s = deadline - time.monotonic()
            if frame is not None or has_moved or left_s <= 0:
                return frame
            ready = self.frames.wait_any(path.events(), left_s)
            if ready is None:
                return None
            has_moved = path.turn(ready)

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> TcpInlet:
        listener, token = self._listener, secrets.token_bytes(TOKEN_BYTES)
        if listener is None:
            raise ProtocolError("the side that dialled opens the outlet")
        try:
            inlet = TcpInlet(num_slabs, slab_bytes, self.wake, lambda: listener.forget(token))
        except OSError as error:
            raise LinkLost(f"no slab memory for the link: {error.strerror}") from None
        self._path = inlet
        self.frames.read_ahead()
        listener.expect(token, self._streams, inlet.attach)
        try:
            self.send(msgspec.msgpack.encode(_Setup(token, self._streams)), timeout_s)
        except LinkLost:
            inlet.close()
            raise
        return inlet

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> TcpOutlet:
        deadline = time.monotonic() + timeout_s
        frame = self.next_frame(timeout_s, _SETUP_LIMIT)
        try:
            setup = _decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not the setup of a tcp link: {error}") from None
        socks: list[socket.socket] = []
        try:
            for _ in range(setup.streams):
                socks.append(self._dial_stream(setup.token, deadline))
            outlet = self._path = TcpOutlet(num_slabs, slab_bytes, socks)
            self.frames.read_ahead()
        except OSError as error:
            for sock in socks:
                sock.close()
            raise LinkLost(f"no data path to the peer: {error}") from None
        return outlet

    def close(self) -> None:
        """With the data path, should nobody have closed it."""
        path, self._path = self._path, None
        if path is not None:
            path.close()
        super().close()

    def _dial_stream(self, token: bytes, deadline: float) -> socket.socket:
        """A stream to where the control channel goes. Raises OSError."""
        control = self.frames.sock
        sock = dial(control.family, control.getpeername(), deadline - time.monotonic())
        try:
            sock.sendall(DATA + token)
        except OSError:
            sock.close()
            raise
        return sock


def listen_tcp_link(host: str, streams: int) -> TcpListener:
    """Listen on a free port of an interface. Raises OSError when there is none such."""
    sock, address = bind_tcp(host)
    return TcpListener(
        sock, address, lambda accepted, listener: TcpChannel(accepted, listener, streams)
    )


def connect_tcp(endpoint: str, timeout_s: float) -> TcpChannel:
    """Open a link to ``listen_tcp_link``. Raises LinkRefused, LinkLost."""
    sock = dial_tcp(endpoint, timeout_s)
    try:
        sock.sendall(CONTROL)
    except OSError as error:
        sock.close()
        raise LinkLost(f"{endpoint} does not answer: {error}") from None
    return TcpChannel(sock)
