"""B023: a client that goes away takes all of its request with it: every choice, every prompt of a
batch, in every state, wherever it is served. A normal end cancels nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import LocalSystem, fake_backend, local_config, local_system
from second_router import second_router

from kvferry.engine.backend import Backend
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 70))
BODY = {"prompt": PROMPT, "max_tokens": 90, "temperature": 0, "ignore_eos": True}
BOTH: dict[str, Any] = {"prefill": {"workers": 0}, "decode": {"role": "both"}}


def slow(block_size: int) -> Backend:
    """Steps of 10 ms, so that an answer lasts long enough to be left."""
    return fake_backend(block_size, delay=lambda plan: time.sleep(0.01))


async def hang_up(system: LocalSystem, gate: HoldAt, path: str, body: dict[str, Any]) -> None:
    """Ask, and go once the request is held; read what comes until then."""
    async with system.apis() as (_, base_url), httpx.AsyncClient(timeout=30) as client:

        async def read() -> None:
            async with client.stream("POST", f"{base_url}{path}", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass

        call = asyncio.create_task(read())
        await gate.reached()
        await eventually(lambda: system.router.status().running + system.router.status().queued)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await eventually(
            lambda: system.router.status().running == system.router.status().queued == 0
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [{"n": 3}, {"prompt": [PROMPT, PROMPT[:9], PROMPT[3:]]}, {"prompt": [PROMPT, [1]], "n": 2}],
    ids=["n choices", "batch", "batch of n choices"],
)
@pytest.mark.parametrize("state", ["waiting", "prefilling", "reserved", "decoding"])
async def test_every_choice_ends(state: str, fields: dict[str, Any], stream: bool) -> None:
    gate = HoldAt(state)
    gates = {"prefill_gate" if state == "prefilling" else "decode_gate": gate}
    async with local_system(local_config(), **gates) as system:  # type: ignore[arg-type]
        await hang_up(system, gate, "/v1/completions", BODY | fields | {"stream": stream})
        await system.settled()
        gate.open()
        assert await system.generate(PROMPT, max_tokens=3) == expected(PROMPT, 3)
        await system.settled()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
async def test_on_a_colocated_worker(state: str, stream: bool) -> None:
    gate = HoldAt(state)
    async with local_system(local_config(**BOTH), decode_gate=gate) as system:
        await hang_up(system, gate, "/v1/completions", BODY | {"n": 2, "stream": stream})
        await system.settled()
        gate.open()
        assert await system.generate(PROMPT, max_tokens=3) == expected(PROMPT, 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat(stream: bool) -> None:
    gate = HoldAt("decoding")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90, "stream": stream}
    async with local_system(local_config(), decode_gate=gate) as system:
        await hang_up(system, gate, "/v1/chat/completions", body)
        await system.settled()


async def test_without_any_gate_in_the_middle_of_the_answer() -> None:
    """Nothing holds the request; it goes within a few steps and not at its end."""
    async with local_system(local_config(), slow) as system, system.apis() as (_, base_url):
        decode = system.workers["decode-0"].loop
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"{base_url}/v1/completions"
            async with client.stream("POST", url, json=BODY | {"stream": True}) as response:
                async for _ in response.aiter_bytes():
                    break
        await system.settled()
        assert decode.steps < 89


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_grpc_with_choices(how: str) -> None:
    gate = HoldAt("decoding")
    request = kvferry_pb2.GenerateRequest(
        token_ids=kvferry_pb2.TokenIds(ids=PROMPT),
        sampling=kvferry_pb2.SamplingParams(max_tokens=90, n=3, ignore_eos=True),
    )
    async with (
        local_system(local_config(), decode_gate=gate) as system,
        system.apis() as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = kvferry_pb2_grpc.KvferryStub(channel).Generate(
            request, timeout=1.0 if how == "deadline" else None
        )

        async def drain() -> None:
            async for _ in call:
                pass

        reader = asyncio.create_task(drain())
        await gate.reached()
        if how == "cancel":
            call.cancel()
        (ended,) = await asyncio.gather(reader, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError | grpc.aio.AioRpcError)
        await system.settled()
        assert system.router.status().running == 0


@pytest.mark.parametrize("pools", [{}, BOTH])
async def test_a_normal_end_cancels_nothing(pools: dict[str, Any]) -> None:
    async with (
        local_system(local_config(**pools)) as first,
        second_router(first) as (system, dial),
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30) as client,
    ):
        for fields in ({"max_tokens": 1}, {"max_tokens": 7}, {"n": 2, "stream": True}):
            answer = await client.post(f"{base_url}/v1/completions", json=BODY | fields)
            assert answer.status_code == 200
        await system.settled()
        assert dial.sent
        assert [m for _, m in dial.sent if m.HasField("cancel")] == []


async def test_what_a_stop_string_ends_early_is_cancelled() -> None:
    stop = "".join(map(chr, expected(PROMPT, 4)))[-1]
    async with (
        local_system(local_config()) as first,
        second_router(first) as (system, dial),
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30) as client,
    ):
        body = BODY | {"stop": [stop]}
        answer = await client.post(f"{base_url}/v1/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        await system.settled()
        assert "cancel" in dial.kinds("decode-0")
