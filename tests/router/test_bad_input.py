"""Bad input over both APIs: refused with the field named, and the next good request succeeds.

Faults B015, B020, B032 and B040.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from bad_input import BOTH, CHAT_FIELDS, JSON_COMPLETIONS, MALFORMED, MESSAGES, user
from fake_engine import ANSWER, MODEL, FakeEngine
from router_under_test import RouterUnderTest

from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

# One router meets all of it, one after the other.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def engine(shared_router: RouterUnderTest) -> FakeEngine:
    shared_router.engine.reset()
    return shared_router.engine


@pytest.fixture
def http(shared_router: RouterUnderTest) -> httpx.AsyncClient:
    return shared_router.http


@pytest.fixture
def channel(shared_router: RouterUnderTest) -> grpc.aio.Channel:
    return shared_router.channel


async def assert_refused(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any] | bytes, field: str
) -> None:
    kind = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = await http.post(path, **kind)  # type: ignore[arg-type]
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")
    assert error["type"] == "invalid_request_error"
    assert engine.requests == [], "nothing of it reached the engine"
    good = await http.post("/v1/completions", json={"prompt": "Hi"})
    assert good.json()["choices"][0]["text"] == ANSWER


@pytest.mark.parametrize(("prompt", "sampling", "field"), BOTH)
async def test_http(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    prompt: str | list[int],
    sampling: dict[str, Any],
    field: str,
) -> None:
    body = {"model": MODEL, "prompt": prompt, **sampling}
    await assert_refused(http, engine, "/v1/completions", body, field)


@pytest.mark.parametrize(("prompt", "sampling", "field"), BOTH)
async def test_grpc(
    channel: grpc.aio.Channel,
    engine: FakeEngine,
    prompt: str | list[int],
    sampling: dict[str, Any],
    field: str,
) -> None:
    stub = kvferry_pb2_grpc.KvferryStub(channel)
    request = kvferry_pb2.GenerateRequest(sampling=kvferry_pb2.SamplingParams(**sampling))
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(f"{field}: ")
    assert dict(caught.value.trailing_metadata())["kvferry-field"] == field
    assert engine.requests == []
    good = [r async for r in stub.Generate(kvferry_pb2.GenerateRequest(text="Hi"))]
    assert "".join(r.text for r in good) == ANSWER


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "logit_bias"])
async def test_grpc_numbers_that_are_none(
    channel: grpc.aio.Channel, field: str, value: float
) -> None:
    sampling = kvferry_pb2.SamplingParams(**{field: {5: value} if field == "logit_bias" else value})
    stub = kvferry_pb2_grpc.KvferryStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await stub.Generate(kvferry_pb2.GenerateRequest(text="Hi", sampling=sampling)).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_grpc_without_a_prompt(channel: grpc.aio.Channel) -> None:
    stub = kvferry_pb2_grpc.KvferryStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="prompt: is required"):
        await stub.Generate(kvferry_pb2.GenerateRequest()).read()


@pytest.mark.parametrize(("body", "field"), JSON_COMPLETIONS)
async def test_json(
    http: httpx.AsyncClient, engine: FakeEngine, body: dict[str, Any], field: str
) -> None:
    await assert_refused(http, engine, "/v1/completions", body, field)


@pytest.mark.parametrize(("messages", "field"), MESSAGES)
async def test_messages(
    http: httpx.AsyncClient, engine: FakeEngine, messages: Any, field: str
) -> None:
    await assert_refused(http, engine, "/v1/chat/completions", {"messages": messages}, field)


@pytest.mark.parametrize(("fields", "field"), CHAT_FIELDS)
async def test_chat_fields(
    http: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], field: str
) -> None:
    body = {"messages": [user("Hi")], **fields}
    await assert_refused(http, engine, "/v1/chat/completions", body, field)


@pytest.mark.parametrize("raw", MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_malformed(
    http: httpx.AsyncClient, engine: FakeEngine, path: str, raw: bytes
) -> None:
    await assert_refused(http, engine, path, raw, "body")


async def test_a_body_that_is_too_large(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    raw = b'{"prompt": "' + b"x" * 2**25 + b'"}'
    response = await http.post("/v1/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"
    good = await http.post("/v1/completions", json={"prompt": "Hi"})
    assert good.status_code == 200


@pytest_asyncio.fixture(loop_scope="module")
async def trap() -> AsyncIterator[tuple[int, list[object]]]:
    """A server on loopback that notes whoever connects."""
    visits: list[object] = []

    def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        visits.append(writer.get_extra_info("peername"))
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = await asyncio.start_server(visit, sock=listener)
        async with server:
            yield port, visits


@pytest.mark.parametrize("kind", ["image_url", "input_image", "file", "input_audio", "video_url"])
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "2130706433", "0x7f000001"]
)
async def test_url_parts_open_no_socket(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    trap: tuple[int, list[object]],
    kind: str,
    host: str,
) -> None:
    port, visits = trap
    url = f"http://{host}:{port}/x.png"
    parts = [{"type": "text", "text": "Look"}, {"type": kind, kind: {"url": url}}]
    body = {"messages": [user(parts)]}
    await assert_refused(http, engine, "/v1/chat/completions", body, "messages[0].content[1].type")
    assert visits == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, {"/tokenize": "prompt", "/detokenize": "tokens"}),
        ({"prompt": "", "tokens": "x"}, {"/tokenize": "prompt", "/detokenize": "tokens"}),
        ({"prompt": 5, "tokens": [999]}, {"/tokenize": "prompt", "/detokenize": "tokens[0]"}),
        ({"model": 5}, {"/tokenize": "model", "/detokenize": "model"}),
    ],
)
async def test_tokenizer_endpoints(
    http: httpx.AsyncClient,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
    field: dict[str, str],
) -> None:
    await assert_refused(http, engine, path, body, field[path])
