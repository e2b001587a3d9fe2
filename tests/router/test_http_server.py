"""The server inside our loop: ports, graceful stop, no signal handlers."""

from __future__ import annotations

import asyncio
import signal
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from kvferry.core.errors import StartupError
from kvferry.router.http_server import make_http_server


class App:
    """Answers when it is let, and notes how each request ended."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entered.set()
        try:
            await self.release.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})
            self.ended.append("answered")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


async def get(port: int) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(f"http://127.0.0.1:{port}/")


async def test_port_in_use() -> None:
    first = make_http_server(App(), "127.0.0.1", 0)
    with pytest.raises(StartupError, match=rf"127\.0\.0\.1:{first.port}.*in use.*--http"):
        make_http_server(App(), "127.0.0.1", first.port)
    await first.stop()
    again = make_http_server(App(), "127.0.0.1", first.port)
    await again.stop()


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
async def test_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(StartupError, match=f"router.http: cannot listen on {host}:0"):
        make_http_server(App(), host, 0)


async def test_stop_lets_an_answer_end() -> None:
    app = App()
    server = make_http_server(app, "127.0.0.1", 0, grace_s=5)
    await server.start()
    answer = asyncio.create_task(get(server.port))
    await app.entered.wait()
    stop = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    app.release.set()
    assert (await answer).text == "done"
    await stop
    assert app.ended == ["answered"]
    with pytest.raises(httpx.ConnectError):
        await get(server.port)


async def test_stop_cancels_what_outlasts_the_grace_time() -> None:
    app = App()
    server = make_http_server(app, "127.0.0.1", 0, grace_s=1)
    await server.start()
    answer = asyncio.create_task(get(server.port))
    await app.entered.wait()
    await server.stop()
    with pytest.raises(httpx.HTTPError):
        (await answer).raise_for_status()
    assert app.ended == ["cancelled"]


async def test_signal_handlers_stay_as_they_were() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    app = App()
    server = make_http_server(app, "127.0.0.1", 0)
    await server.start()
    app.release.set()
    assert (await get(server.port)).status_code == 200
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    await server.stop()


async def test_tokens_do_not_wait_for_acknowledgements() -> None:
    """asyncio turns Nagle's algorithm off only on sockets that name their protocol."""
    server = make_http_server(App(), "127.0.0.1", 0)
    assert server.listener.proto == socket.IPPROTO_TCP
    await server.stop()
