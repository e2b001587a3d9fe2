"""Runs an ASGI application inside the caller's event loop and signal handling."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from kvferry.core.errors import StartupError

BACKLOG = 1024
KEEPALIVE_S = 15


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process that runs the router has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One listening HTTP server. ``port`` is the real one, also when 0 was asked for."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self._server = server
        self.listener = listener
        self.host, self.port = listener.getsockname()[:2]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve. Connections made since the server was built wait in the listener."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self.listener]))

    async def stop(self) -> None:
        """Take no new connections; answers under way may end within the grace time."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self.listener.close()


def make_http_server(app: ASGIApp, host: str, port: int, *, grace_s: float = 10.0) -> HttpServer:
    """Listen on ``host:port``. Raises StartupError when that is not possible."""
    try:
        listener = _listen(host, port)
    except OSError as error:
        raise StartupError(
            f"router.http: cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another address with --http HOST:PORT, or port 0 for a free one"
        ) from None
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )
    return HttpServer(_Server(config), listener)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is; left on,
    # it makes each token wait for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: a client whose host vanished ends as one that hung up.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
