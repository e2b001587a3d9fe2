"""A request that is given up in any state, in any way, leaves nothing behind on either side.

B002 and B023 for every state of the hand-off; B030 where two clients give the same id.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import grpc
import httpx
import pytest
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import LocalSystem, local_config, local_system
from stalls import StalledConnect

from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.slow

PROMPT = list(range(40, 70))
BODY = {"prompt": PROMPT, "max_tokens": 50, "temperature": 0, "ignore_eos": True}
DEADLINE_S = 1.5


@dataclass(slots=True)
class Held:
    """A system in which the next request gets as far as one state and stays there."""

    system: LocalSystem
    reached: Callable[[], Awaitable[None]]
    let_go: Callable[[], None]


@asynccontextmanager
async def queued() -> AsyncIterator[Held]:
    """Two reservations are held on the decode worker: the router keeps the third request."""
    gate = HoldAt("waiting")
    async with local_system(local_config(), decode_gate=gate) as system:
        before = [asyncio.create_task(system.generate(PROMPT[:5])) for _ in range(2)]
        decode = system.workers["decode-0"].loop
        await eventually(lambda: decode.load().waiting == 2)

        async def in_queue() -> None:
            while system.router.status().queued != 1:
                await asyncio.sleep(0.005)

        yield Held(system, in_queue, gate.open)
        gate.open()
        assert await asyncio.gather(*before) == [expected(PROMPT[:5], 8)] * 2


@asynccontextmanager
async def waiting() -> AsyncIterator[Held]:
    """In the decode worker's queue, before the ledger has admitted it."""
    gate = HoldAt("waiting")
    async with local_system(local_config(), decode_gate=gate) as system:
        yield Held(system, gate.reached, gate.open)


@asynccontextmanager
async def reserved() -> AsyncIterator[Held]:
    """The decode worker holds a lease; the prefill worker has the prompt and has not begun."""
    gate = HoldAt("waiting")
    async with local_system(local_config(), prefill_gate=gate) as system:
        yield Held(system, gate.reached, gate.open)


@asynccontextmanager
async def prefilling() -> AsyncIterator[Held]:
    """Between two chunks."""
    gate = HoldAt("prefilling")
    async with local_system(local_config(), prefill_gate=gate) as system:
        yield Held(system, gate.reached, gate.open)


@asynccontextmanager
async def transferring() -> AsyncIterator[Held]:
    """The first token is out; the KV link does not come up."""
    connect = StalledConnect()
    async with local_system(local_config(), connect=connect) as system:
        yield Held(system, connect.asked, connect.open)


@asynccontextmanager
async def decoding() -> AsyncIterator[Held]:
    """In the running batch."""
    gate = HoldAt("decoding")
    async with local_system(local_config(), decode_gate=gate) as system:
        yield Held(system, gate.reached, gate.open)


async def hang_up_stream(held: Held, grpc_address: str, base_url: str) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                task = asyncio.create_task(_reached_then(held, limit))
                async with client.stream(
                    "POST", f"{base_url}/v1/completions", json=BODY | {"stream": True}
                ) as response:
                    async for _ in response.aiter_bytes():
                        pass
        await task


async def hang_up_whole(held: Held, grpc_address: str, base_url: str) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        call = asyncio.create_task(client.post(f"{base_url}/v1/completions", json=BODY))
        await held.reached()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def cancel_grpc(held: Held, grpc_address: str, base_url: str) -> None:
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        call = kvferry_pb2_grpc.KvferryStub(channel).Generate(_grpc_request())
        reader = asyncio.create_task(_drain(call))
        await held.reached()
        call.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def grpc_deadline(held: Held, grpc_address: str, base_url: str) -> None:
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        call = asyncio.create_task(_drain(stub.Generate(_grpc_request(), timeout=DEADLINE_S)))
        await held.reached()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


STATES = [queued, waiting, reserved, prefilling, transferring, decoding]
WAYS = [hang_up_stream, hang_up_whole, cancel_grpc, grpc_deadline]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_nothing_is_left_of_a_request_that_was_given_up(state, way) -> None:
    async with state() as held, held.system.apis() as (grpc_address, base_url):
        await way(held, grpc_address, base_url)
        if state is queued:
            held.let_go()
        await held.system.settled()
        held.let_go()
        assert await held.system.generate(PROMPT, max_tokens=3) == expected(PROMPT, 3)
        await held.system.settled()


async def test_giving_up_one_of_two_requests_with_the_same_id_hits_just_that_one() -> None:
    gate = HoldAt("decoding")
    async with (
        local_system(local_config(), decode_gate=gate) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, headers={"x-request-id": "same"}) as client,
    ):
        calls = [
            asyncio.create_task(client.post(f"{base_url}/v1/completions", json=BODY))
            for _ in range(2)
        ]
        await gate.reached()
        while system.router.status().running != 2:
            await asyncio.sleep(0.005)
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        gate.open()
        answer = await calls[1]
        assert answer.headers["x-request-id"] == "same"
        assert answer.json()["usage"]["completion_tokens"] == 50
        await system.settled()


async def _reached_then(held: Held, limit: asyncio.Timeout) -> None:
    await held.reached()
    limit.reschedule(asyncio.get_running_loop().time())


async def _drain(call: AsyncIterator[kvferry_pb2.GenerateResponse]) -> None:
    async for _ in call:
        pass


def _grpc_request() -> kvferry_pb2.GenerateRequest:
    return kvferry_pb2.GenerateRequest(
        token_ids=kvferry_pb2.TokenIds(ids=PROMPT),
        sampling=kvferry_pb2.SamplingParams(max_tokens=50, temperature=0, ignore_eos=True),
    )
