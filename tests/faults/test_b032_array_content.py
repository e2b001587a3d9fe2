"""B032: text in array form is read whole, by a stated rule, or refused by the path of the field."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fake_engine import BOS, TURN
from router_under_test import RouterUnderTest, running_router

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.fixture
def router(shared: RouterUnderTest) -> RouterUnderTest:
    shared.engine.reset()
    return shared


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# content -> the text it stands for: the parts with a line break between them
TEXTS: list[tuple[Any, str]] = [
    ("plain", "plain"),
    ([part("one")], "one"),
    ([part("one", "input_text")], "one"),
    ([part("one"), part("two")], "one\ntwo"),
    ([part("one", "input_text"), part("two")], "one\ntwo"),
    ([part("one"), part(""), part("two")], "one\n\ntwo"),
    ([part("caf\u00e9 "), part("\U0001f389")], "caf\u00e9 \n\U0001f389"),
    ([{**part("one"), "cache_control": {"type": "ephemeral"}}], "one"),
    ([part("x" * 30)] * 5, "\n".join(["x" * 30] * 5)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
@pytest.mark.parametrize(("content", "text"), TEXTS)
async def test_text_parts_arrive_whole(
    router: RouterUnderTest, content: Any, text: str, role: str, stream: bool
) -> None:
    messages = [{"role": role, "content": content}, *user("go")]
    body = {"messages": messages, "stream": stream, "max_tokens": 2}
    response = await router.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    shown = "system" if role == "developer" else role
    expected = [BOS, TURN, *f"{shown}:{text}\n".encode(), TURN, *b"user:go\n"]
    assert list(router.engine.requests[0].prompt_token_ids) == expected
    same = (await router.http.post("/tokenize", json={"messages": messages})).json()
    assert same["tokens"] == expected


ASSISTANT: list[tuple[dict[str, Any], str]] = [
    ({"content": None, "tool_calls": [{"id": "a", "type": "function"}]}, "tool_calls"),
    ({"tool_calls": [{"id": "a", "type": "function"}]}, "tool_calls"),
    ({"content": "yes", "tool_calls": [{"id": "a"}]}, "tool_calls"),
    ({"content": "", "refusal": "I cannot say that"}, "refusal"),
    ({"content": None, "audio": {"id": "a"}}, "audio"),
    ({"content": None}, "content"),
    ({"content": [{"type": "refusal", "refusal": "no"}]}, "content[0].type"),
    ({"content": 5}, "content"),
    ({"content": [["nested"]]}, "content[0]"),
    ({"content": [part("a"), {"type": "image_url", "image_url": {"url": "x"}}]}, "content[1].type"),
    ({"content": [{"type": "text", "content": "text under another name"}]}, "content[0].text"),
    ({"content": [{**part("a"), "input_text": "more"}]}, "content[0].input_text"),
    ({"content": [{"type": ["text"], "text": "a"}]}, "content[0].type"),
]


@pytest.mark.parametrize(("message", "field"), ASSISTANT)
async def test_nothing_of_an_earlier_message_is_dropped(
    router: RouterUnderTest, message: dict[str, Any], field: str
) -> None:
    messages = [*user("Hi"), {"role": "assistant", **message}, *user("go")]
    response = await router.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == f"messages[1].{field}"
    assert router.engine.requests == []


async def test_fields_that_say_nothing_do_no_harm(router: RouterUnderTest) -> None:
    """What the SDK writes when it repeats an answer of ours."""
    empty = {"refusal": None, "tool_calls": None, "function_call": None, "audio": None}
    messages = [*user("Hi"), {"role": "assistant", "content": "yes", **empty}, *user("go")]
    response = await router.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert "x-kvferry-ignored-fields" not in response.headers


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([part("x")], "prompt[0]"),
        ([part("x", "input_text"), part("y")], "prompt[0]"),
        (["x", part("y")], "prompt[1]"),
        ([["x", "y"]], "prompt[0][0]"),
        (part("x"), "prompt"),
    ],
)
async def test_completions_take_texts_not_parts(
    router: RouterUnderTest, prompt: Any, field: str
) -> None:
    response = await router.http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert router.engine.requests == []


async def test_the_same_field_over_again_is_the_last_one(shared: RouterUnderTest) -> None:
    """JSON's own rule for a key that stands twice; nothing of ours reads the first."""
    shared.engine.reset()
    raw = b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    client: httpx.AsyncClient = shared.http
    await client.post("/v1/chat/completions", content=raw)
    assert bytes(shared.engine.requests[0].prompt_token_ids[2:]) == b"user:b\n"
