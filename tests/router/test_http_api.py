"""The OpenAI API over real sockets, on the scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fake_engine import ANSWER, EOS, MODEL, Hold, script
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

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", CHAT)]


def events(text: str) -> list[Any]:
    """The events of a stream; the last one must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", text
    return [json.loads(line) for line in lines[:-1]]


def piece(choice: dict[str, Any]) -> str:
    text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    assert isinstance(text, str)
    return text


@pytest.fixture
def http(router: RouterUnderTest) -> httpx.AsyncClient:
    return router.http


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_stream_joins_to_the_whole(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    sampling = {"n": 2, "stop": ["caf"], "model": MODEL}
    whole = (await http.post(path, json=body | sampling)).json()
    streamed = await http.post(path, json=body | sampling | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = events(streamed.text)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len(chunks) > 6
    for index, choice in enumerate(whole["choices"]):
        assert choice["index"] == index
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(piece(c) for c in mine) == text == ANSWER[: ANSWER.index("caf")]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"] == "caf"
    assert all("usage" not in chunk for chunk in chunks)


async def test_chat_begins_with_the_role(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2})
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        deltas = [c["delta"] for k in chunks for c in k["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])
        assert deltas[-1] == {}


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_usage(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    whole = (await http.post(path, json=body | {"max_tokens": 5, "n": 2})).json()["usage"]
    prompt_tokens = 2 if "prompt" in body else 1 + 1 + len("user:Hi\n")
    assert whole == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 10,
        "total_tokens": prompt_tokens + 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    asked = body | {"max_tokens": 5, "n": 2, "stream": True}
    options: dict[str, Any] = {"include_usage": True}
    chunks = events((await http.post(path, json=asked | {"stream_options": options})).text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole
    assert all(chunk["usage"] is None for chunk in chunks[:-1])

    options["continuous_usage_stats"] = True
    chunks = events((await http.post(path, json=asked | {"stream_options": options})).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < 10
    assert chunks[-1]["usage"] == whole


async def test_batch_echo_and_order(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, i: script(f"{bytes(request.prompt_token_ids)[-1]}.{i}")
    body = {"prompt": ["a", "b"], "n": 2, "echo": True}
    whole = (await router.http.post("/v1/completions", json=body)).json()
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == ["a97.0", "a97.1", "b98.0", "b98.1"]
    chunks = events((await router.http.post("/v1/completions", json=body | {"stream": True})).text)
    joined = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"]
    assert joined == texts


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105]]])
async def test_token_prompt_that_ends_inside_a_character(
    router: RouterUnderTest, prompt: list[Any], echo: bool
) -> None:
    """Fault B022: two bytes of an emoji in the prompt, two in the answer."""
    emoji = "\U0001f389".encode()
    ids = [*prompt, *emoji[:2]] if prompt == [72, 105] else [[72, 105, *emoji[:2]]]
    steps = [TokenStep((token,)) for token in emoji[2:]]
    router.engine.script = lambda request, index: [*steps, *script(" x")]
    body = {"prompt": ids, "echo": echo}
    expected = ("Hi" if echo else "") + "\U0001f389 x"
    whole = (await router.http.post("/v1/completions", json=body)).json()
    assert whole["choices"][0]["text"] == expected
    chunks = events((await router.http.post("/v1/completions", json=body | {"stream": True})).text)
    assert "".join(piece(c) for chunk in chunks for c in chunk["choices"]) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"prompt": "Hi", "max_tokens": 3, "logprobs": 2, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    parts = events(response.text) if stream else [response.json()]
    entries = [c["logprobs"] for part in parts for c in part["choices"] if c["logprobs"]]
    assert [token for e in entries for token in e["tokens"]] == [" ", "P", "a"]
    assert [value for e in entries for value in e["token_logprobs"]] == [-0.5] * 3
    assert [offset for e in entries for offset in e["text_offset"]] == [0, 1, 2]
    tops = [top for e in entries for top in e["top_logprobs"]]
    assert tops == [{" ": -0.5, "A": -9999.0}, {"P": -0.5, "A": -9999.0}, {"a": -0.5, "A": -9999.0}]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(http: httpx.AsyncClient, stream: bool) -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 1, "stream": stream}
    response = await http.post("/v1/chat/completions", json=body)
    parts = events(response.text) if stream else [response.json()]
    entries = [
        entry
        for part in parts
        for choice in part["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert "".join(e["token"] for e in entries[:5]) == ANSWER[:5]
    assert entries[0]["bytes"] == [32]
    assert entries[0]["top_logprobs"] == [{"token": " ", "logprob": -0.5, "bytes": [32]}]
    assert entries[-1]["token"] == "<eos>"


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


async def test_eos_alone_is_an_empty_answer(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, index: script("")
    whole = (await router.http.post("/v1/chat/completions", json=CHAT)).json()
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 1
    assert EOS == 257
    streamed = await router.http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    (chunk,) = events(streamed.text)
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"
