"""A host between two others: forwards TCP connections to one port, until it is told to stop."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

CHUNK = 1 << 16


class Forwarder:
    """Forwards on a thread of its own. A connection that is frozen stays open and says nothing."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(0.02)
        self._selector = selectors.DefaultSelector()
        self._socks: list[socket.socket] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.connections = 0
        self._threads = [
            threading.Thread(target=self._accept),
            threading.Thread(target=self._forward),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def freeze(self) -> None:
        """All connections of now, for good. New ones are forwarded."""
        with self._lock:
            for sock in self._socks:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(sock)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for sock in (self._server, *self._socks):
            sock.close()
        self._selector.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                near, _ = self._server.accept()
            except TimeoutError:
                continue
            far = socket.create_connection(self._target)
            near.setblocking(True)
            with self._lock:
                self.connections += 1
                self._socks += [near, far]
                self._selector.register(near, selectors.EVENT_READ, far)
                self._selector.register(far, selectors.EVENT_READ, near)

    def _forward(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.02):
                with self._lock:
                    if key.fd not in self._selector.get_map():
                        continue
                    source, drain = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    try:
                        data = source.recv(CHUNK)
                        if data:
                            drain.sendall(data)
                            continue
                    except OSError:
                        pass
                    for sock in (source, drain):
                        with contextlib.suppress(KeyError):
                            self._selector.unregister(sock)
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)
