"""B015: an empty prompt is refused by its field and harms nobody, at the APIs and in a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import httpx
import pytest
from fake_engine import ByteCodec
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import LocalSystem, local_config, local_system

from kvferry.core.config import RouterConfig
from kvferry.core.errors import InvalidRequest
from kvferry.core.ids import Incarnation
from kvferry.engine.ports import FromRouter, SessionOpened
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc
from kvferry.proto import worker_pb2 as pb
from kvferry.router.intake import Intake

PROMPT = list(range(40, 60))
COMPLETIONS: list[tuple[Any, str]] = [
    ("", "prompt"),
    ([""], "prompt[0]"),
    ([], "prompt"),
    ([[]], "prompt[0]"),
    (["a", "", "b"], "prompt[1]"),
    ([[1], [], [2]], "prompt[1]"),
]
CHATS: list[tuple[Any, str]] = [
    ([], "messages"),
    ([{"role": "user", "content": ""}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": ""}]}], "messages[0].content"),
]
BOTH: dict[str, Any] = {"prefill": {"workers": 0}, "decode": {"role": "both"}}


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_under_way_and_later_ones_are_unaffected(stream: bool) -> None:
    gate = HoldAt("decoding")
    async with (
        local_system(local_config(), decode_gate=gate) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        under_way = asyncio.create_task(system.generate(PROMPT))
        await gate.reached()
        cases = [("/v1/completions", "prompt", *case) for case in COMPLETIONS]
        cases += [("/v1/chat/completions", "messages", *case) for case in CHATS]
        for path, key, value, field in cases:
            response = await client.post(path, json={key: value, "stream": stream})
            assert response.status_code == 400, value
            assert response.json()["error"]["param"] == field
        gate.open()
        assert await under_way == expected(PROMPT, 8)
        assert await system.generate(PROMPT[:1]) == expected(PROMPT[:1], 8)
        await system.settled()


@pytest.mark.parametrize("prompt", [{"text": ""}, {"token_ids": kvferry_pb2.TokenIds()}, {}])
async def test_over_grpc(prompt: dict[str, Any]) -> None:
    async with (
        local_system(local_config()) as system,
        system.apis() as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(kvferry_pb2.GenerateRequest(**prompt)).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["kvferry-field"] == "prompt"
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


class Silent(ByteCodec):
    """A tokenizer whose normalizer leaves nothing of white space, and a template that is empty."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.strip())

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return []


async def test_a_text_without_tokens_is_empty_too() -> None:
    intake = Intake(Silent(), model_name="m", max_model_len=100, config=RouterConfig())
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        await intake.completion("  \n", {})
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        await intake.completion(["a", " "], {})
    assert caught.value.field == "prompt[1]"
    with pytest.raises(InvalidRequest, match="no tokens") as caught:
        await intake.chat([{"role": "user", "content": "Hi"}], {})
    assert caught.value.field == "messages"


class Collects:
    """A router of its own that keeps what it is told."""

    incarnation = Incarnation(77)

    def __init__(self) -> None:
        self.messages: list[pb.WorkerMessage] = []

    def send(self, message: pb.WorkerMessage) -> None:
        if not message.HasField("cache_delta"):
            self.messages.append(message)


def say(system: LocalSystem, worker: str, message: pb.RouterMessage) -> Collects:
    port = Collects()
    system.workers[worker].loop.post(SessionOpened(port))
    system.workers[worker].loop.post(FromRouter(port, message))
    return port


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0", "both-0"])
async def test_a_worker_refuses_one_that_a_router_let_through(worker: str) -> None:
    """Nothing would be computed for it, so that a step with it has no logits to sample from."""
    gate = HoldAt("prefilling")
    config = local_config(**BOTH if worker == "both-0" else {})
    async with local_system(config, prefill_gate=gate) as system:
        under_way = asyncio.create_task(system.generate(PROMPT))
        spec = pb.SequenceSpec(deadline_s=60, sampling=pb.Sampling(max_tokens=5))
        key = pb.Key(request=1, attempt=1)
        if worker == "prefill-0":
            await gate.reached()
            message = pb.RouterMessage(prefill=pb.Prefill(key=key, sequence=spec))
        else:
            message = pb.RouterMessage(
                reserve=pb.Reserve(key=key, sequence=spec, local=worker == "both-0")
            )
        port = say(system, worker, message)
        await eventually(lambda: port.messages)
        (answer,) = port.messages
        assert answer.HasField("refused") or answer.failed.kind == "refused"
        gate.open()
        assert await under_way == expected(PROMPT, 8)
        await system.settled()
