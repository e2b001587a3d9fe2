"""The client over a real socket: core's types go in, come out, and errors come back as raised."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing

import pytest
from fake_engine import ANSWER, EOS, MODEL, FakeEngine, Hold, script

from kvferry.client import sync
from kvferry.client.client import KvferryClient
from kvferry.core.errors import (
    AttemptFailed,
    DeadlineExceeded,
    InvalidRequest,
    KvferryError,
    Overloaded,
    ProtocolError,
    Unavailable,
    UnknownModel,
)
from kvferry.core.request import FinishReason, TextDelta, TokenStep, Usage
from kvferry.core.sampling import SamplingParams

SAMPLING = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    min_p=0.125,
    seed=2**64 - 1,
    presence_penalty=1.5,
    frequency_penalty=-1.5,
    repetition_penalty=1.25,
    stop=("zz", "y"),
    stop_token_ids=(9, 10),
    ignore_eos=True,
    logit_bias={5: -1.5},
    logprobs=2,
)


async def collect(client: KvferryClient, timeout_s: float | None = None) -> list[TextDelta]:
    return [delta async for delta in client.generate("Hi", timeout_s=timeout_s)]


async def test_text_and_tokens_come_back(client: KvferryClient) -> None:
    usage = Usage()
    deltas = [delta async for delta in client.generate("Hi", usage=usage)]
    assert "".join(delta.text for delta in deltas) == ANSWER
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert tokens == [*ANSWER.encode(), EOS]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].timeline is not None
    assert deltas[-1].timeline.transfer_bytes == 4096
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 20, 2)


async def test_every_sampling_field_arrives(client: KvferryClient, engine: FakeEngine) -> None:
    async for delta in client.generate([1, 2, 3], SAMPLING, model=MODEL):
        assert len(delta.logprobs) == len(delta.token_ids)
    (request,) = engine.requests
    assert request.prompt_token_ids == (1, 2, 3)
    assert request.sampling == SAMPLING.model_copy(update={"seed": -1})


async def test_unset_fields_keep_the_defaults(client: KvferryClient, engine: FakeEngine) -> None:
    await collect(client)
    sampling = engine.requests[0].sampling
    assert sampling.seed is not None
    assert sampling == SamplingParams(seed=sampling.seed, max_tokens=198)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (InvalidRequest("prompt", "is bad: very"), InvalidRequest),
        (UnknownModel("model", "is not served"), UnknownModel),
        (Overloaded("queue is full"), Overloaded),
        (AttemptFailed("worker gone"), Unavailable),
        (DeadlineExceeded("too late"), DeadlineExceeded),
        (ProtocolError("secret detail"), KvferryError),
    ],
)
async def test_errors_come_back_as_they_were(
    client: KvferryClient, engine: FakeEngine, raised: KvferryError, kind: type[KvferryError]
) -> None:
    engine.script = lambda request, index: [TokenStep((65,)), raised]
    with pytest.raises(KvferryError) as caught:
        await collect(client)
    assert type(caught.value) is kind
    if isinstance(raised, InvalidRequest):
        assert caught.value.args == raised.args
        assert vars(caught.value) == vars(raised)
    assert "secret" not in str(caught.value)
    engine.script = lambda request, index: script("fine")
    assert "".join(delta.text for delta in await collect(client)) == "fine"


async def test_a_router_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    async with KvferryClient(target) as client:
        with pytest.raises(Unavailable, match=target):
            await collect(client)
        with pytest.raises(Unavailable, match=target):
            await client.status()


async def test_leaving_early_stops_the_request(client: KvferryClient, engine: FakeEngine) -> None:
    hold = Hold()
    engine.script = lambda request, index: [TokenStep((65,)), hold]
    async with aclosing(client.generate("Hi")) as deltas:
        assert (await anext(deltas)).text == "A"
        await hold.reached.wait()
    await engine.idle()
    assert engine.closed_early == 1


async def test_timeout_is_the_deadline(client: KvferryClient, engine: FakeEngine) -> None:
    engine.script = lambda request, index: [Hold()]
    with pytest.raises(DeadlineExceeded):
        await collect(client, timeout_s=0.2)
    await engine.idle()
    assert engine.requests[0].deadline_s == pytest.approx(0.2, abs=0.15)


async def test_status(client: KvferryClient, engine: FakeEngine) -> None:
    engine.not_ready = "no decode worker"
    status = await client.status()
    assert (status.model, status.ready, status.reason) == (MODEL, False, "no decode worker")


async def test_without_asyncio(target: str, engine: FakeEngine) -> None:
    def work() -> str:
        deltas = list(sync.generate(target, "Hi", SamplingParams(n=2)))
        assert sync.status(target).ready
        with pytest.raises(InvalidRequest) as caught:
            list(sync.generate(target, ""))
        assert caught.value.field == "prompt"
        return "".join(delta.text for delta in deltas if delta.index == 1)

    assert await asyncio.to_thread(work) == ANSWER
    await engine.idle()
