"""The HTTP API over real sockets: fields in, errors out, ids, health."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import MODEL, Hold, script
from router_under_test import RouterUnderTest

from kvferry.core.errors import (
    DeadlineExceeded,
    KvferryError,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from kvferry.core.request import TokenStep

# One router meets all tests, one after the other.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def router(shared_router: RouterUnderTest) -> RouterUnderTest:
    shared_router.engine.reset()
    return shared_router


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", CHAT)]


@pytest.fixture
def http(router: RouterUnderTest) -> httpx.AsyncClient:
    return router.http


async def test_every_sampling_field_arrives(router: RouterUnderTest) -> None:
    fields: dict[str, Any] = {
        "max_completion_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 11,
        "n": 2,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "stop": "zz",
        "stop_token_ids": [5],
        "ignore_eos": True,
        "logit_bias": {"7": -100},
    }
    response = await router.http.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert response.status_code == 200, response.text
    sampling = router.engine.requests[0].sampling.model_dump(exclude={"logprobs", "max_tokens"})
    fields |= {"top_k": 0, "stop": ("zz",), "stop_token_ids": (5,), "logit_bias": {7: -100.0}}
    assert router.engine.requests[0].sampling.max_tokens == fields.pop("max_completion_tokens")
    assert sampling == fields


async def test_content_parts_are_joined_by_line_breaks(router: RouterUnderTest) -> None:
    """Fault B032."""
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    messages = [
        {"role": "developer", "content": "rule"},
        {"role": "user", "content": parts},
    ]
    await router.http.post("/v1/chat/completions", json={"messages": messages})
    prompt = bytes(t for t in router.engine.requests[0].prompt_token_ids if t < 256).decode()
    assert prompt == "system:rule\nuser:one\ntwo\n"


async def test_ignored_fields_are_named(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = CHAT | {"user": "me", "top_a": 0.5, "na\u00efve\r\nx": 1, "top_p": None, "tools": None}
    body["messages"] = [{"role": "user", "content": "Hi", "mood": "good"}]
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    named = response.headers["x-kvferry-ignored-fields"]
    assert named == "messages[0].mood,top_a,na\\xefve\\r\\nx"
    assert "top_a" in caplog.text
    streamed = await http.post("/v1/completions", json={"prompt": "x", "q": 1, "stream": True})
    assert streamed.headers["x-kvferry-ignored-fields"] == "q"
    plain = await http.post("/v1/completions", json={"prompt": "x", "n": 1})
    assert "x-kvferry-ignored-fields" not in plain.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("queue is full"), 429, "rate_limit_error"),
        (Unavailable("no decode worker"), 503, "service_unavailable"),
        (WorkerLost("decode-0 is gone"), 503, "service_unavailable"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (ProtocolError("secret detail"), 500, "server_error"),
    ],
)
async def test_errors_before_the_first_token(
    router: RouterUnderTest, error: KvferryError, status: int, kind: str, stream: bool
) -> None:
    router.engine.script = lambda request, index: [error]
    response = await router.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["type"] == kind
    assert "secret" not in response.text
    assert ("retry-after" in response.headers) == isinstance(error, Unavailable)
    router.engine.script = lambda request, index: script("fine")
    assert "fine" in (await router.http.post("/v1/completions", json={"prompt": "x"})).text


async def test_error_in_mid_stream_is_an_event_and_the_end(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, index: [TokenStep((65,)), WorkerLost("gone")]
    response = await router.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.status_code == 200
    first, last = (json.loads(e[6:]) for e in response.text.strip().split("\n\n"))
    assert first["choices"][0]["text"] == "A"
    assert last["error"]["message"] == "gone"
    assert last["error"]["code"] == "unavailable"


async def test_a_defect_is_500_and_the_next_request_succeeds(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, index: [ZeroDivisionError("secret")]
    response = await router.http.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    router.engine.script = lambda request, index: script("fine")
    assert "fine" in (await router.http.post("/v1/completions", json={"prompt": "x"})).text


async def test_unknown_model(http: httpx.AsyncClient) -> None:
    for path, body in ENDPOINTS:
        response = await http.post(path, json=body | {"model": "other"})
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert MODEL in error["message"]
    response = await http.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)]
)
async def test_paths_in_the_same_error_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_health(router: RouterUnderTest) -> None:
    for path in ("/health", "/health/live", "/health/ready"):
        assert (await router.http.get(path)).status_code == 200
    router.engine.not_ready = "no decode worker is ready"
    assert (await router.http.get("/health/live")).status_code == 200
    for path in ("/health", "/health/ready"):
        response = await router.http.get(path)
        assert response.status_code == 503
        assert response.json()["reason"] == "no decode worker is ready"
    assert "kvferry_ready 0.0" in (await router.http.get("/metrics")).text


async def test_tokenize_and_back(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "caf\u00e9"}
    answer = (await http.post("/tokenize", json=body)).json()
    assert answer == {"count": 5, "max_model_len": 200, "tokens": [99, 97, 102, 195, 169]}
    back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "caf\u00e9"}
    chat = (await http.post("/tokenize", json=CHAT)).json()
    assert chat["tokens"][0] == 256
    assert chat["tokens"].count(256) == 1, "exactly one BOS (fault B033)"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b"abc-1.2_Z", "abc-1.2_Z"),
        (b"a b\tc/d?e\xff", "abcde"),
        (b"x" * 5000, "x" * 128),
    ],
)
async def test_request_id_is_echoed_made_safe(
    http: httpx.AsyncClient, given: bytes, shown: str
) -> None:
    """Fault B030."""
    for path in ("/v1/completions", "/nowhere", "/health"):
        response = await http.post(path, json={"prompt": "x"}, headers={b"x-request-id": given})
        assert response.headers["x-request-id"] == shown


async def test_without_a_request_id_there_is_a_random_one(http: httpx.AsyncClient) -> None:
    shown = [(await http.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert len(set(shown)) == 2


async def test_equal_request_ids_are_different_requests(router: RouterUnderTest) -> None:
    """Fault B030: one is abandoned, the other one of the same id is untouched."""
    holds = [Hold(), Hold()]
    waiting = iter(holds)
    router.engine.script = lambda request, index: [next(waiting), *script("fine")]
    headers = {"x-request-id": "same"}
    first, second = (
        asyncio.create_task(
            router.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        )
        for _ in range(2)
    )
    for hold in holds:
        await hold.reached.wait()
    assert router.engine.running == 2
    first.cancel()
    await router.engine.until_running(1)
    for hold in holds:
        hold.release.set()
    done = await second
    assert done.json()["choices"][0]["text"] == "fine"
    assert done.json()["id"] != "same"
    assert done.headers["x-request-id"] == "same"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert router.engine.closed_early == 1
