"""Control channels over sockets: what the transports between processes have in common.

A transport is a ``SocketChannel`` with its own data path, and listeners that make such channels.
Unix sockets have names in the abstract namespace, so nothing is left behind by kill -9.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.core.units import parse_address
from kvferry.kv_transfer.messages import MAX_FRAME
from kvferry.kv_transfer.transport import Channel, Inlet, Outlet
from kvferry.kv_transfer.transports.framing import FrameSocket, Wakeup

_UCRED = struct.Struct("3i")
_BACKLOG = 64
PAUSE_S = 0.05
"""Between two tries of what the system has no room for."""


class SocketChannel(ABC):
    """Frames over a connected socket, which it owns. Subclasses add the data path."""

    transport = ""
    awake_s = 0.0
    """See ``FrameSocket``."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames = FrameSocket(sock, awake_s=self.awake_s)

    def send(self, frame: bytes, timeout_s: float) -> None:
        self.frames.send(frame, timeout_s)

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        return self.frames.receive(timeout_s, limit)

    def next_frame(self, timeout_s: float, limit: int) -> bytes:
        """What the peer says while the data path is opened; wakes are for later.

        Raises LinkLost when it says nothing, ProtocolError for a frame above ``limit``.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            frame = self.receive(left_s, limit)
            if frame is not None:
                return frame
        raise LinkLost("the peer opens no data path")

    def wake(self) -> None:
        self.frames.wake()

    def close(self) -> None:
        self.frames.close()

    @abstractmethod
    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Inlet: ...

    @abstractmethod
    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Outlet: ...


class SocketListener:
    """Accepts control channels on a bound socket, which it owns."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: str,
        channel: Callable[[socket.socket], Channel],
        is_welcome: Callable[[socket.socket], bool] = lambda sock: True,
    ) -> None:
        self.endpoint = endpoint
        self._sock = sock
        self._sock.listen(_BACKLOG)
        self._sock.setblocking(False)
        self._channel = channel
        self._is_welcome = is_welcome
        self._wakeup = Wakeup()

    def accept(self, timeout_s: float) -> Channel | None:
        if self._wakeup.wait_readable(self._sock, timeout_s):
            return None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return None
        except OSError:
            self._pause(timeout_s)
            return None
        if not self._is_welcome(sock):
            sock.close()
            return None
        try:
            return self._channel(sock)
        except LinkLost:
            self._pause(timeout_s)
            return None

    def _pause(self, timeout_s: float) -> None:
        """Out of descriptors, say: the caller waits in line still, so do not spin on it."""
        time.sleep(min(timeout_s, PAUSE_S))

    def stop(self) -> None:
        self._wakeup.set()

    def close(self) -> None:
        self._sock.close()
        self._wakeup.close()


def listen_unix(scheme: str, channel: Callable[[socket.socket], Channel]) -> SocketListener:
    """Listen on a fresh random name, for processes of the same user on this host."""
    name = f"kvferry-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(f"\0{name}")
    return SocketListener(sock, f"{scheme}:{name}", channel, _same_user)


def listen_tcp(
    scheme: str, host: str, channel: Callable[[socket.socket], Channel]
) -> SocketListener:
    """Listen on a free port of an interface. Raises OSError when there is none such."""
    sock, address = bind_tcp(host)
    return SocketListener(sock, f"{scheme}:{address}", channel)


def bind_tcp(host: str) -> tuple[socket.socket, str]:
    """A socket on a free port of an interface, and its ``HOST:PORT``. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    port = sock.getsockname()[1]
    return sock, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial_unix(endpoint: str, timeout_s: float) -> socket.socket:
    """A connection to ``listen_unix``. Raises LinkRefused, LinkLost."""
    try:
        sock = dial(socket.AF_UNIX, f"\0{endpoint.partition(':')[2]}", timeout_s)
    except OSError as error:
        raise _why(endpoint, error) from None
    if not _same_user(sock):
        sock.close()
        raise LinkRefused(f"{endpoint} belongs to another user")
    return sock


def dial_tcp(endpoint: str, timeout_s: float) -> socket.socket:
    """A connection to ``listen_tcp``: the first address of the host that answers.

    Raises LinkRefused, LinkLost.
    """
    deadline = time.monotonic() + timeout_s
    try:
        host, port = parse_address(endpoint.partition(":")[2])
        found = addresses_of(host, port, timeout_s)
    except (ValueError, OSError) as error:
        is_again = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        if is_again or isinstance(error, TimeoutError):
            raise LinkLost(f"{endpoint}: {error}") from None
        raise LinkRefused(f"{endpoint!r} is no address: {error}") from None
    failure = OSError("no address")
    for family, _, _, _, address in found:
        try:
            return dial(family, address, deadline - time.monotonic())
        except OSError as error:
            failure = error
    raise _why(endpoint, failure)


def addresses_of(
    host: str, port: int, timeout_s: float, look_up: Callable[..., Any] = socket.getaddrinfo
) -> Any:
    """What ``socket.getaddrinfo`` finds. Raises OSError; TimeoutError when it takes too long."""
    with suppress(socket.gaierror):
        # Addresses in digits need no name server, and no thread.
        return look_up(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(look_up(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # A look-up has no time limit of its own and cannot be called back: nobody waits for its end.
    try:
        threading.Thread(target=ask, name=f"kv-resolver {host}", daemon=True).start()
    except RuntimeError as error:
        raise OSError(str(error)) from None
    try:
        answer = answers.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise TimeoutError(f"no name server says where {host} is") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def dial(family: int, address: str | tuple[Any, ...], timeout_s: float) -> socket.socket:
    """A connected stream socket. Raises OSError."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.001, timeout_s))
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _why(endpoint: str, error: OSError) -> LinkLost:
    if isinstance(error, ConnectionRefusedError):
        return LinkRefused(f"nobody listens at {endpoint}")
    return LinkLost(f"{endpoint} does not answer: {error}")


def _same_user(sock: socket.socket) -> bool:
    """Abstract names have no file permissions: the kernel's word on the peer stands in."""
    try:
        packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError:
        return False
    _, uid, _ = _UCRED.unpack(packed)
    return bool(uid == os.geteuid())
