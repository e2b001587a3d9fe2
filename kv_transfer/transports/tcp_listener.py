"""The one port of the tcp transport: control channels and data streams come to the same address.

Whoever connects says first what it is: ``kvfC``, then the frames of a control channel; or ``kvfD``
and the token of a link, then the slabs of a data stream. A token is random, is good for one link,
and reached the peer over the control channel, after it had proved itself. Who says anything else,
or nothing in time, is shown out.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.core.errors import LinkLost
from kvferry.kv_transfer.transport import Channel
from kvferry.kv_transfer.transports.control import PAUSE_S
from kvferry.kv_transfer.transports.framing import Wakeup

CONTROL = b"kvfC"
DATA = b"kvfD"
TOKEN_BYTES = 32
MAX_STRANGERS = 64
"""Connections that have not said yet what they are, and control channels not accepted yet, at most:
of the first the oldest gives way, of the second the newest."""
_BACKLOG = 64


@dataclass(slots=True)
class _Stranger:
    sock: socket.socket
    deadline: float
    said: bytearray = field(default_factory=bytearray)

    @property
    def missing(self) -> int:
        """Bytes to read before the next look: never one that belongs to the channel."""
        if len(self.said) < len(DATA):
            return len(DATA) - len(self.said)
        return len(DATA) + TOKEN_BYTES - len(self.said)


@dataclass(slots=True)
class _Expected:
    streams: int
    take: Callable[[socket.socket], None]


class TcpListener:
    """Accepts on a thread of its own, so that data streams find their link whatever else waits."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        channel: Callable[[socket.socket, TcpListener], Channel],
        greeting_timeout_s: float = 5.0,
    ) -> None:
        """Takes ownership of a bound socket. ``channel`` makes the receiver's side of a link."""
        self.endpoint = f"tcp:{address}"
        self._sock = sock
        self._channel = channel
        self._greeting_timeout_s = greeting_timeout_s
        self._changed = threading.Condition()
        self._stopped = False
        self._waiting: deque[Channel] = deque()
        self._expected: dict[bytes, _Expected] = {}
        self._strangers: dict[int, _Stranger] = {}
        """By descriptor, the oldest first."""
        self._wakeup = Wakeup()
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-tcp-listener")
        self._thread.start()

    def accept(self, timeout_s: float) -> Channel | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopped, max(0.0, timeout_s))
            return self._waiting.popleft() if self._waiting and not self._stopped else None

    def expect(self, token: bytes, streams: int, take: Callable[[socket.socket], None]) -> None:
        """Hand over so many data streams that present this token."""
        with self._changed:
            self._expected[token] = _Expected(streams, take)

    def forget(self, token: bytes) -> None:
        """Hand over no more of them. Idempotent."""
        with self._changed:
            self._expected.pop(token, None)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._wakeup.set()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            resume_at = 0.0
            while not self._stopped:
                now = time.monotonic()
                due = [each.deadline for each in self._strangers.values()]
                socks = [each.sock for each in self._strangers.values()]
                if now >= resume_at:
                    socks.append(self._sock)
                else:
                    due.append(resume_at)
                wait_s = min(due) - now if due else 3600.0
                ready = self._wakeup.wait_any(dict.fromkeys(socks, select.POLLIN), wait_s) or ()
                for fd in ready:
                    if fd in self._strangers:
                        self._hear(self._strangers[fd])
                if self._sock.fileno() in ready and not self._admit():
                    resume_at = time.monotonic() + PAUSE_S
                self._expire()
        finally:
            self._shut()

    def _admit(self) -> bool:
        """Let one connection in. False when the system cannot: out of descriptors, say."""
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return True
        except OSError:
            return False
        sock.setblocking(False)
        if len(self._strangers) >= MAX_STRANGERS:
            self._dismiss(next(iter(self._strangers.values())))
        stranger = _Stranger(sock, time.monotonic() + self._greeting_timeout_s)
        self._strangers[sock.fileno()] = stranger
        self._hear(stranger)
        return True

    def _hear(self, stranger: _Stranger) -> None:
        try:
            while data := stranger.sock.recv(stranger.missing):
                stranger.said += data
                said = bytes(stranger.said)
                if said == CONTROL:
                    return self._open(stranger)
                if not DATA.startswith(said[: len(DATA)]) and not CONTROL.startswith(said):
                    break
                if len(said) == len(DATA) + TOKEN_BYTES:
                    return self._hand_over(stranger, said[len(DATA) :])
        except BlockingIOError:
            return None
        except OSError:
            pass
        return self._dismiss(stranger)

    def _open(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.sock.fileno()]
        with self._changed:
            if len(self._waiting) < MAX_STRANGERS and not self._stopped:
                # LinkLost: out of descriptors, and the socket is closed.
                with contextlib.suppress(LinkLost):
                    self._waiting.append(self._channel(stranger.sock, self))
                self._changed.notify_all()
                return
        stranger.sock.close()

    def _hand_over(self, stranger: _Stranger, presented: bytes) -> None:
        del self._strangers[stranger.sock.fileno()]
        with self._changed:
            for token, expected in self._expected.items():
                if hmac.compare_digest(token, presented):
                    expected.streams -= 1
                    if not expected.streams:
                        del self._expected[token]
                    expected.take(stranger.sock)
                    return
        stranger.sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                break
            self._dismiss(stranger)

    def _dismiss(self, stranger: _Stranger) -> None:
        del self._strangers[stranger.sock.fileno()]
        stranger.sock.close()

    def _shut(self) -> None:
        with self._changed:
            self._stopped = True
            for channel in self._waiting:
                channel.close()
            self._waiting.clear()
            self._changed.notify_all()
        for stranger in self._strangers.values():
            stranger.sock.close()
        self._strangers.clear()
        self._sock.close()
        self._wakeup.close()
