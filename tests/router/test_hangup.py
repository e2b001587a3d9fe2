"""A client that goes away takes its request with it, over both APIs (fault B023)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest
from fake_engine import Hold, script
from router_under_test import RouterUnderTest, running_router

from kvferry.core.config import RouterConfig
from kvferry.core.request import TokenStep
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.slow


async def connect(port: int, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request over a socket of its own and read nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    await writer.drain()
    return writer


def outcomes(router: RouterUnderTest, api: str) -> dict[str, float]:
    names = ("ok", "cancelled", "error")
    read = router.metrics.registry.get_sample_value
    return {
        name: read("kvferry_request_total", {"api": api, "outcome": name}) or 0.0 for name in names
    }


@pytest.mark.parametrize("num_tokens", [0, 2], ids=["before the first token", "while it streams"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        ("completions", "/v1/completions", {"prompt": "x"}),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
async def test_http(
    router: RouterUnderTest,
    api: str,
    path: str,
    body: dict[str, Any],
    stream: bool,
    n: int,
    num_tokens: int,
) -> None:
    holds: list[Hold] = []

    def hang(request: object, index: int) -> list[Any]:
        holds.append(Hold())
        return [*[TokenStep((65,))] * num_tokens, holds[-1]]

    router.engine.script = hang
    writer = await connect(router.http_port, path, body | {"stream": stream, "n": n})
    await router.engine.until_running(n)
    for hold in holds:
        await hold.reached.wait()
    assert router.engine.running == n
    writer.close()
    await router.engine.idle()
    assert router.engine.closed_early == n
    router.engine.script = lambda request, index: script("fine")
    assert "fine" in (await router.http.post("/v1/completions", json={"prompt": "x"})).text
    assert outcomes(router, api)["cancelled"] == 1
    assert outcomes(router, api)["error"] == 0


async def test_half_a_body(router: RouterUnderTest) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await router.http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert len(router.engine.requests) == 1


async def test_a_normal_end_cancels_nothing(router: RouterUnderTest) -> None:
    for stream in (False, True):
        body = {"prompt": "x", "stream": stream}
        assert (await router.http.post("/v1/completions", json=body)).status_code == 200
    assert router.engine.closed_early == 0
    assert outcomes(router, "completions") == {"ok": 2, "cancelled": 0, "error": 0}


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_grpc(router: RouterUnderTest, how: str, n: int, num_tokens: int) -> None:
    hold = Hold()
    router.engine.script = lambda request, index: [*[TokenStep((65,))] * num_tokens, hold]
    request = kvferry_pb2.GenerateRequest(text="x", sampling=kvferry_pb2.SamplingParams(n=n))
    async with grpc.aio.insecure_channel(router.grpc_target) as channel:
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        call = stub.Generate(request, timeout=0.2 if how == "deadline" else None)
        await hold.reached.wait()
        if how == "cancel":
            call.cancel()
        elif how == "deadline":
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.engine.idle()
    assert router.engine.closed_early == n
    router.engine.script = lambda request, index: script("fine")
    stub = kvferry_pb2_grpc.KvferryStub(router.channel)
    good = [r async for r in stub.Generate(kvferry_pb2.GenerateRequest(text="x"))]
    assert "".join(r.text for r in good) == "fine"
    assert outcomes(router, "grpc")["error"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_routers_own_deadline(stream: bool) -> None:
    async with running_router(RouterConfig(request_timeout_s=0.1)) as router:
        router.engine.script = lambda request, index: [Hold()]
        body = {"prompt": "x", "stream": stream}
        response = await router.http.post("/v1/completions", json=body)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        stub = kvferry_pb2_grpc.KvferryStub(router.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(kvferry_pb2.GenerateRequest(text="x")).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert router.engine.running == 0
