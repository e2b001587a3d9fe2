"""B022: a prompt of token ids that ends inside a character: its pending bytes are completed by the
answer or shown once as a mark, and no earlier text of the prompt is ever sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fake_engine_model import expected
from local_system import local_config, local_system
from router_under_test import RouterUnderTest, running_router

from kvferry.core.request import FinishReason, TokenStep
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMOJI = "\U0001f389"
MARK = "\ufffd"
PLAIN = "plain text of some length, "


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[RouterUnderTest]:
    async with running_router() as router:
        yield router


@pytest.fixture
def router(shared: RouterUnderTest) -> RouterUnderTest:
    shared.engine.reset()
    return shared


def answer_of(tokens: bytes) -> list[TokenStep]:
    steps = [TokenStep((token,)) for token in tokens]
    return [*steps[:-1], TokenStep((tokens[-1],), finish_reason=FinishReason.LENGTH)]


# name -> (pending bytes of the prompt, answer's bytes, its text)
CASES: dict[str, tuple[bytes, bytes, str]] = {
    "completed": (EMOJI.encode()[:2], EMOJI.encode()[2:] + b" more", EMOJI + " more"),
    "completed after one byte": (EMOJI.encode()[:1], EMOJI.encode()[1:] + b"!", EMOJI + "!"),
    "completed by the only token": (EMOJI.encode()[:3], EMOJI.encode()[3:], EMOJI),
    "never completed": (EMOJI.encode()[:2], b"more", MARK + "more"),
    "cut off before it is complete": (EMOJI.encode()[:2], EMOJI.encode()[2:3], MARK),
    "another character begins": (EMOJI.encode()[:2], "\u00e9".encode(), MARK + "\u00e9"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("case", CASES)
async def test_http(router: RouterUnderTest, case: str, batch: bool, stream: bool) -> None:
    pending, tokens, text = CASES[case]
    router.engine.script = lambda request, index: answer_of(tokens)
    ids = [*PLAIN.encode(), *pending]
    body = {"prompt": [ids, ids] if batch else ids, "n": 2, "stream": stream}
    response = await router.http.post("/v1/completions", json=body)
    parts = (
        [json.loads(e[6:]) for e in response.text.split("\n\n") if e and "[DONE]" not in e]
        if stream
        else [response.json()]
    )
    texts = [""] * (4 if batch else 2)
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
    assert set(texts) == {text}


@pytest.mark.parametrize("case", CASES)
async def test_grpc(router: RouterUnderTest, case: str) -> None:
    pending, tokens, text = CASES[case]
    router.engine.script = lambda request, index: answer_of(tokens)
    ids = kvferry_pb2.TokenIds(ids=[*PLAIN.encode(), *pending])
    request = kvferry_pb2.GenerateRequest(token_ids=ids)
    answers = [a async for a in kvferry_pb2_grpc.KvferryStub(router.channel).Generate(request)]
    assert "".join(answer.text for answer in answers) == text


async def test_a_stop_string_may_match_the_completed_character(router: RouterUnderTest) -> None:
    router.engine.script = lambda request, index: answer_of(EMOJI.encode()[2:] + b" tail")
    body: dict[str, Any] = {
        "prompt": [*PLAIN.encode(), *EMOJI.encode()[:2]],
        "stop": [EMOJI, PLAIN[:5]],
    }
    choice = (await router.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("", EMOJI)


async def test_across_the_whole_system() -> None:
    """The fake model says ASCII, so that the pending bytes become one mark."""
    prompt = [*PLAIN.encode(), *EMOJI.encode()[:2]]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "stream": True}
    async with (
        local_system(local_config()) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        response = await client.post("/v1/completions", json=body)
    events = [json.loads(e[6:]) for e in response.text.split("\n\n") if e and "[DONE]" not in e]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == MARK + "".join(map(chr, expected(prompt, 6)))
