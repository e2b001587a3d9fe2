"""The connection between rank 0 of a worker and another of its ranks, on one host.

Frames of msgpack over ``multiprocessing.connection``, whose challenge proves on both sides that the
other knows the cluster's secret; nothing is ever unpickled. ``MAX_FRAME`` bounds what is read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import msgspec

from kvferry.core.errors import ProtocolError, RankLost
from kvferry.engine.rank_messages import Message, decode, encode

MAX_FRAME = 1 << 28
"""A plan of the largest batch is far below."""
HANDSHAKE_S = 5.0
LOOPBACK = "127.0.0.1"


class RankChannel:
    """One end. Any thread may send; one receives. Everything raises RankLost once it broke."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        """A frame that goes to several ranks is encoded once."""
        try:
            with self._lock:
                self._connection.send_bytes(frame)
        except OSError as error:
            raise RankLost(f"a rank takes no messages: {error}") from None

    def receive(self) -> Message:
        """Waits for the next message. Raises ProtocolError for what is none."""
        try:
            return decode(self._connection.recv_bytes(MAX_FRAME))
        except (EOFError, OSError) as error:
            raise RankLost(f"the connection between ranks ended: {error}") from None
        except msgspec.DecodeError as error:
            raise ProtocolError(f"between ranks: {error}") from None

    def close(self) -> None:
        """Wakes the thread that receives, and ends the peer's. Idempotent."""
        with contextlib.suppress(OSError), socket.socket(fileno=self._connection.fileno()) as own:
            try:
                own.shutdown(socket.SHUT_RDWR)
            finally:
                own.detach()


class RankListener:
    """Where the other ranks come in. Strangers are turned away."""

    def __init__(self, secret: str, send_timeout_s: float) -> None:
        self._server = socket.create_server((LOOPBACK, 0))
        self._secret = secret.encode()
        self._send_timeout_s = send_timeout_s

    @property
    def port(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def accept(self, timeout_s: float) -> RankChannel | None:
        """The next rank that proves itself; None: it was a stranger. Raises TimeoutError when
        nobody comes.
        """
        self._server.settimeout(timeout_s)
        connected, _ = self._server.accept()
        return _proved(connected, self._send_timeout_s, self._admit)

    def close(self) -> None:
        self._server.close()

    def _admit(self, connection: Connection) -> None:
        deliver_challenge(connection, self._secret)
        answer_challenge(connection, self._secret)


def dial_rank_0(port: int, secret: str, timeout_s: float) -> RankChannel:
    """Raises RankLost when rank 0 is not there or does not know the secret."""

    def prove(connection: Connection) -> None:
        answer_challenge(connection, secret.encode())
        deliver_challenge(connection, secret.encode())

    try:
        connected = socket.create_connection((LOOPBACK, port), timeout_s)
    except OSError as error:
        raise RankLost(f"rank 0 is not at port {port}: {error}") from None
    channel = _proved(connected, timeout_s, prove)
    if channel is None:
        raise RankLost(f"who listens at port {port} is not rank 0")
    return channel


def _proved(
    connected: socket.socket, send_timeout_s: float, prove: Callable[[Connection], None]
) -> RankChannel | None:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HANDSHAKE_S))
    connection = Connection(connected.detach())
    try:
        prove(connection)
        _wait_for_ever(connection)
    except (AuthenticationError, AssertionError, EOFError, OSError):
        connection.close()
        return None
    return RankChannel(connection)


def _wait_for_ever(connection: Connection) -> None:
    with socket.socket(fileno=connection.fileno()) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(0.0))
        own.detach()


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
