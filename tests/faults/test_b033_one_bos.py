"""B033: one BOS in a chat, the tokenizer's own default in completions, and a template that is
missing or refuses is the client's error with the template's words, over HTTP with a real tokenizer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from prometheus_client import CollectorRegistry
from tiny_tokenizer import BOS_ID, CHAT_TEMPLATE, save_tokenizer

from kvferry.core.config import RouterConfig
from kvferry.models.tokenizer import Tokenizer
from kvferry.router.http_api import make_app
from kvferry.router.intake import Intake
from kvferry.router.metrics import RouterMetrics

USER = [{"role": "user", "content": "hi"}]
WITHOUT_BOS = CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
ALTERNATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@asynccontextmanager
async def served(tokenizer: Tokenizer) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    engine = FakeEngine()
    intake = Intake(tokenizer, model_name="m", max_model_len=200, config=RouterConfig())
    app = make_app(engine, intake, RouterMetrics(CollectorRegistry()))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, engine


async def prompt_of(client: httpx.AsyncClient, engine: FakeEngine, **body: Any) -> list[int]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await client.post(path, json={"max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    tokens = list(engine.requests[-1].prompt_token_ids)
    if not isinstance(body.get("prompt"), list):
        assert (await client.post("/tokenize", json=body)).json()["tokens"] == tokens
    return tokens


@pytest.mark.parametrize("add_bos", [False, True])
async def test_a_template_with_a_bos(add_bos: bool, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, add_bos=add_bos))
    async with served(tokenizer) as (client, engine):
        chat = await prompt_of(client, engine, messages=USER)
        assert chat[0] == BOS_ID
        assert chat.count(BOS_ID) == 1
        plain = await prompt_of(client, engine, prompt="hi")
        assert plain.count(BOS_ID) == add_bos
        assert plain[0] == BOS_ID or not add_bos
        # What a client renders by itself and sends as ids is the very same prompt.
        assert await prompt_of(client, engine, prompt=chat) == chat


async def test_the_template_alone_decides(tmp_path: Path) -> None:
    """Its chats have no BOS where it writes none, whatever plain texts get."""
    with_bos = save_tokenizer(tmp_path, add_bos=True, chat_template=WITHOUT_BOS)
    async with served(Tokenizer(with_bos)) as (client, engine):
        assert BOS_ID not in await prompt_of(client, engine, messages=USER)
        assert (await prompt_of(client, engine, prompt="hi")).count(BOS_ID) == 1


async def test_a_bos_in_the_clients_own_text_is_not_ours_to_remove(tmp_path: Path) -> None:
    async with served(Tokenizer(save_tokenizer(tmp_path, add_bos=True))) as (client, engine):
        chat = await prompt_of(client, engine, messages=[{"role": "user", "content": "hi"}] * 3)
        assert chat.count(BOS_ID) == 1


async def assert_refused(
    client: httpx.AsyncClient, engine: FakeEngine, messages: Any, words: str
) -> None:
    for stream in (False, True):
        body = {"messages": messages, "stream": stream}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "messages"
        assert words in response.json()["error"]["message"]
        assert engine.requests == []
    assert (await client.post("/v1/completions", json={"prompt": "hi"})).status_code == 200


async def test_no_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=None))
    async with served(tokenizer) as (client, engine):
        await assert_refused(client, engine, USER, "no chat template")


async def test_a_template_that_raises(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=ALTERNATE))
    async with served(tokenizer) as (client, engine):
        await assert_refused(client, engine, USER * 2, "Conversation roles must alternate")
        engine.requests.clear()
        turns = [*USER, {"role": "assistant", "content": "yes"}, *USER]
        assert (await prompt_of(client, engine, messages=turns)).count(BOS_ID) == 1


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].content + 'x' }}", "{% for m in messages %}"]
)
async def test_a_template_that_is_broken(template: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save_tokenizer(tmp_path, chat_template=template))
    async with served(tokenizer) as (client, engine):
        await assert_refused(client, engine, USER, "chat template")
