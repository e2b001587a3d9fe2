"""B030: whatever id clients give, requests are told apart: overlapping, right after an abort, and
through two front-ends. An abort hits just the right one, and no count goes below zero.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import LocalSystem, local_config, local_system
from second_router import second_router

from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

PROMPTS = [list(range(start, start + 25)) for start in (40, 41, 42)]
SAME = {"x-request-id": "same"}
NUM_TOKENS = 40


def body(prompt: list[int]) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


def text_of(prompt: list[int]) -> str:
    return "".join(map(chr, expected(prompt, NUM_TOKENS)))


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def live(system: LocalSystem) -> int:
    status = system.router.status()
    return int(status.running + status.queued)


def no_worker_is_counted_below_zero(system: LocalSystem) -> bool:
    status = system.router.status()
    counts = [status.running, status.queued]
    for worker in status.workers:
        counts += [worker.running, worker.waiting, worker.blocks.free, worker.blocks.in_use]
    return min(counts) >= 0


async def post(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
    return await client.post("/v1/completions", json=body(prompt), headers=SAME)


async def give_up(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("state", ["waiting", "decoding"])
async def test_overlapping_and_one_is_given_up_and_its_id_used_again_at_once(state: str) -> None:
    gate = HoldAt(state)
    async with (
        local_system(local_config(), decode_gate=gate) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        first, second = (asyncio.create_task(post(client, PROMPTS[i])) for i in (0, 1))
        await gate.reached()
        await eventually(lambda: live(system) == 2)
        await give_up(first)
        # The very next thing is the same id again, while the first may still be on its way out.
        third = asyncio.create_task(post(client, PROMPTS[2]))
        await eventually(lambda: live(system) == 2)
        assert no_worker_is_counted_below_zero(system)
        gate.open()
        answers = [await second, await third]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts == [text_of(PROMPTS[1]), text_of(PROMPTS[2])]
        assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
        assert len({answer.json()["id"] for answer in answers}) == 2
        assert "same" not in {answer.json()["id"] for answer in answers}
        await system.settled()
        assert no_worker_is_counted_below_zero(system)
        found = await gauges(client)
        assert found["kvferry_running"] == found["kvferry_queued"] == 0
        assert all(value >= 0 for value in found.values())


async def test_over_and_over_with_one_id() -> None:
    async with (
        local_system(local_config()) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        for round_ in range(10):
            gone = asyncio.create_task(post(client, PROMPTS[0]))
            await eventually(lambda: live(system))
            await give_up(gone)
            answer = await post(client, PROMPTS[1 + round_ % 2])
            assert answer.json()["choices"][0]["text"] == text_of(PROMPTS[1 + round_ % 2])
        await system.settled()
        assert no_worker_is_counted_below_zero(system)


async def test_through_two_front_ends() -> None:
    gate = HoldAt("decoding")
    async with (
        local_system(local_config(), decode_gate=gate) as one,
        second_router(one) as (two, _),
        one.apis() as (_, url_one),
        two.apis() as (_, url_two),
        httpx.AsyncClient(timeout=30, base_url=url_one) as client_one,
        httpx.AsyncClient(timeout=30, base_url=url_two) as client_two,
    ):
        # Both routers number their requests alike: these two have every number in common.
        first = asyncio.create_task(post(client_one, PROMPTS[0]))
        second = asyncio.create_task(post(client_two, PROMPTS[1]))
        decode = one.workers["decode-0"].role.sequences
        await gate.reached()
        await eventually(lambda: sum(s.lease > 0 for s in decode) == 2)
        assert len({s.key.request for s in decode}) == 1
        await give_up(first)
        await eventually(lambda: len(decode) == 1)
        gate.open()
        answer = await second
        assert answer.json()["choices"][0]["text"] == text_of(PROMPTS[1])
        again = await post(client_one, PROMPTS[2])
        assert again.json()["choices"][0]["text"] == text_of(PROMPTS[2])
        await one.settled()
        for system in (one, two):
            assert no_worker_is_counted_below_zero(system)


async def test_over_grpc_and_http_together() -> None:
    gate = HoldAt("decoding")
    request = kvferry_pb2.GenerateRequest(
        token_ids=kvferry_pb2.TokenIds(ids=PROMPTS[0]),
        sampling=kvferry_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
        client_request_id="same",
    )
    async with (
        local_system(local_config(), decode_gate=gate) as system,
        system.apis() as (address, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        calls = [stub.Generate(request) for _ in range(2)]

        async def text(call: Any) -> str:
            return "".join([answer.text async for answer in call])

        readers = [asyncio.create_task(text(call)) for call in calls]
        posted = asyncio.create_task(post(client, PROMPTS[1]))
        await eventually(lambda: live(system) == 3)
        await gate.reached()
        calls[0].cancel()
        await asyncio.gather(readers[0], return_exceptions=True)
        gate.open()
        assert await readers[1] == text_of(PROMPTS[0])
        assert (await posted).json()["choices"][0]["text"] == text_of(PROMPTS[1])
        await system.settled()
