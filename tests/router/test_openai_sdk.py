"""The openai package against a router: what its users call works as they expect."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from fake_engine import ANSWER, MODEL
from router_under_test import RouterUnderTest

from kvferry.core.errors import Overloaded


@pytest.fixture
async def sdk(router: RouterUnderTest) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{router.base_url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


MESSAGES = [{"role": "user", "content": "The capital of France is"}]


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).owned_by == "kvferry"


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, seed=1, n=2
    )
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.choices[1].finish_reason == "stop"
    assert answer.choices[0].logprobs.content[0].top_logprobs[1].logprob == -9999.0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 40


async def test_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == ANSWER
    assert chunks[-1].usage.completion_tokens == 20


async def test_completion(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=4, logprobs=1, extra_body={"min_p": 0.1}
    )
    assert [choice.text for choice in answer.choices] == [ANSWER[:4]] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.tokens == list(ANSWER[:4])
    stream = await sdk.completions.create(model=MODEL, prompt=[72], stream=True, stop=["caf"])
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " Paris, "


async def test_errors_become_the_packages_own(
    router: RouterUnderTest, sdk: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.completions.create(model=MODEL, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await sdk.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    router.engine.script = lambda request, index: [Overloaded("queue is full")]
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        await sdk.completions.create(model=MODEL, prompt="x")


async def test_leaving_a_stream_stops_the_request(
    router: RouterUnderTest, sdk: openai.AsyncOpenAI
) -> None:
    stream = await sdk.completions.create(model=MODEL, prompt="x", stream=True)
    await anext(aiter(stream))
    await stream.close()
    await router.engine.idle()
