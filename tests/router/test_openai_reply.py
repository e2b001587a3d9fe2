"""Answers of the OpenAI API, whole and streamed: text, usage, echo, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import ANSWER, EOS, MODEL, script
from router_under_test import RouterUnderTest

from kvferry.core.request import TokenStep

# One router meets all tests, one after the other.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def router(shared_router: RouterUnderTest) -> RouterUnderTest:
    shared_router.engine.reset()
    return shared_router


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
