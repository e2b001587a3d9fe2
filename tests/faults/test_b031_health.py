"""B031: readiness follows what workers can do, liveness does not; clients hear 503, not a hang."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import fake_backend, local_config, local_system

from kvferry.engine.plan import StepPlan

PROMPT = list(range(20, 43))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
async def test_a_worker_that_is_gone(name: str) -> None:
    async with (
        local_system(local_config()) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        assert (await client.get("/health/ready")).status_code == 200
        worker = system.dial.workers.pop(name)
        system.dial.streams.pop(name).cut()
        await eventually(lambda: not system.router.ready()[0])
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        assert ready.status_code == 503
        assert name.split("-")[0] in ready.json()["reason"]
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4})
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        system.dial.workers[name] = worker
        await system.router.wait_ready(20)
        assert (await client.get("/health/ready")).status_code == 200
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


async def test_those_that_wait_are_answered_when_the_worker_goes() -> None:
    gate = HoldAt("waiting")
    config = local_config(router={"max_attempts": 1})
    async with (
        local_system(config, decode_gate=gate) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=10, base_url=base_url) as client,
    ):
        body = {"prompt": PROMPT, "max_tokens": 4}
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(4)]
        await eventually(
            lambda: system.router.status().running + system.router.status().queued == 4
        )
        worker = system.dial.workers.pop("decode-0")
        system.dial.streams.pop("decode-0").cut()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {503}
        system.dial.workers["decode-0"] = worker


async def test_a_step_that_does_not_return_is_told() -> None:
    """The router calls a worker unready by this number, whose bound is 30 s."""
    stuck, free = threading.Event(), threading.Event()

    def hang(plan: StepPlan) -> None:
        stuck.set()
        free.wait(20)

    async with local_system(
        local_config(), lambda size: fake_backend(size, before_execute=hang)
    ) as system:
        prefill = system.workers["prefill-0"].loop
        assert prefill.load().stalled_s == 0
        call = asyncio.create_task(system.generate(PROMPT, max_tokens=1))
        try:
            await eventually(stuck.is_set)
            first = prefill.load().stalled_s
            await eventually(lambda: prefill.load().stalled_s > first)
        finally:
            free.set()
        assert await call == expected(PROMPT, 1)
        await eventually(lambda: prefill.load().stalled_s == 0)


async def test_a_worker_all_of_whose_steps_fail_refuses_and_recovers() -> None:
    """Clients hear 503 within their attempts; the worker lives, and the next request is served."""
    broken = True

    def fail(plan: StepPlan) -> None:
        if broken:
            raise RuntimeError("the device is gone")

    config = local_config(router={"max_attempts": 2})
    async with (
        local_system(config, lambda size: fake_backend(size, before_execute=fail)) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=10, base_url=base_url) as client,
    ):
        body = {"prompt": PROMPT, "max_tokens": 4}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in "abc"))
        assert {answer.status_code for answer in answers} == {503}
        assert (await client.get("/health/live")).status_code == 200
        await system.settled()
        broken = False
        assert await system.generate(PROMPT, max_tokens=4) == expected(PROMPT, 4)
