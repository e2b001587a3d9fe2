"""Attempts fail and the request goes on: the client sees neither gap nor duplicate."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import aclosing

import pytest
from fake_engine_model import VOCAB_SIZE, expected
from gates import HoldAt
from local_system import LocalSystem, fake_backend, local_config, local_system

from kvferry.core.errors import AttemptFailed, InvalidRequest, LinkLost, Unavailable
from kvferry.engine.plan import StepPlan
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.transport import Channel

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 43))


async def read(system: LocalSystem, after: int, act) -> list[int]:
    """All tokens of PROMPT's answer; ``act`` is called once ``after`` of them have come."""
    tokens: list[int] = []
    async with aclosing(system.stream(PROMPT, max_tokens=20)) as steps:
        async for step in steps:
            tokens += step.token_ids
            if len(tokens) == after:
                act()
    return tokens


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after", [1, 5])
async def test_a_lost_session_is_followed_by_another_attempt(name: str, after: int) -> None:
    is_cut = threading.Event()

    def hold(plan: StepPlan) -> None:
        """Steps past the first ``after`` tokens wait until the session is cut."""
        if plan.context_lens.max() >= len(PROMPT) + after - 1:
            assert is_cut.wait(30)

    config = local_config()
    async with local_system(config, lambda size: fake_backend(size, before_execute=hold)) as system:

        def cut() -> None:
            system.dial.streams[name].cut()
            is_cut.set()

        assert await read(system, after, cut) == expected(PROMPT, 20)
        await system.settled()
        if name == "decode-0":
            assert system.timelines[0].attempts >= 2


async def test_a_step_that_fails_costs_an_attempt_and_no_token() -> None:
    failing = {3, 9}

    def fail(plan: StepPlan) -> None:
        if plan.step in failing:
            failing.discard(plan.step)
            raise RuntimeError("the device fell over")

    config = local_config()
    async with local_system(config, lambda size: fake_backend(size, before_execute=fail)) as system:
        assert await system.generate(PROMPT, max_tokens=20) == expected(PROMPT, 20)
        await system.settled()


@pytest.mark.parametrize("roles", ["1P1D", "both"])
async def test_a_poisonous_request_does_not_take_its_neighbours_with_it(roles: str) -> None:
    prompts = [[i, 1, 2, 3] for i in range(6)]
    wanted = [expected(prompt, 8) for prompt in prompts]
    poison = next(t for t in range(6, VOCAB_SIZE) if not any(t in answer for answer in wanted))

    def choke(plan: StepPlan) -> None:
        if poison in plan.token_ids:
            raise RuntimeError("the device cannot stomach this")

    config = local_config()
    if roles == "both":
        config = local_config(prefill={"workers": 0}, decode={"role": "both"})
    async with local_system(
        config, lambda size: fake_backend(size, before_execute=choke)
    ) as system:
        bad = asyncio.create_task(system.generate([1, poison, 2]))
        answers = await asyncio.gather(*(system.generate(prompt) for prompt in prompts))
        assert answers == wanted
        with pytest.raises(AttemptFailed, match="cannot stomach"):
            await bad
        assert [timeline.attempts for timeline in system.timelines[1:]] == [1] * len(prompts)
        await system.settled()


async def test_attempts_without_progress_are_bounded() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    config = local_config(router={"max_attempts": 3})
    async with local_system(config, lambda size: fake_backend(size, before_execute=fail)) as system:
        with pytest.raises(AttemptFailed, match="the device is gone"):
            await system.generate(PROMPT)
        assert system.timelines[0].attempts == 3
        await system.settled()


async def test_a_link_that_does_not_come_up_fails_the_transfer_and_the_next_one_succeeds() -> None:
    calls = 0

    def flaky(endpoint: str, timeout_s: float) -> Channel:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise LinkLost("no route to host")
        return connect(endpoint, timeout_s)

    config = local_config(transfer={"progress_timeout_s": 0.3})
    async with local_system(config, connect=flaky) as system:
        assert await system.generate(PROMPT, max_tokens=6) == expected(PROMPT, 6)
        assert calls > 2
        await system.settled()


async def test_sequences_that_outgrow_the_decode_worker_come_back_and_finish() -> None:
    """B007."""
    # Six sequences of up to 10 + 60 tokens on 24 blocks of 4: at most one fits to its end.
    preempted = 0
    config = local_config(decode={"growth_tokens": 4}, router={"max_attempts": 8})
    async with local_system(
        config, lambda size: fake_backend(size, num_blocks=24, max_model_len=96)
    ) as system:
        prompts = [[i, *range(50, 59)] for i in range(6)]
        answers = await asyncio.gather(*(system.generate(p, max_tokens=60) for p in prompts))
        assert answers == [expected(p, 60) for p in prompts]
        preempted = sum(timeline.attempts - 1 for timeline in system.timelines)
        await system.settled()
    assert preempted > 0, "the pool was too large for this test to mean anything"


async def test_prompts_that_fit_only_one_at_a_time_run_one_after_the_other() -> None:
    config = local_config(prefill={"max_batch_tokens": 64})
    async with local_system(
        config, lambda size: fake_backend(size, num_blocks=24 if size == 4 else 64)
    ) as system:
        prompts = [[i, *([7] * 79)] for i in range(4)]
        answers = await asyncio.gather(*(system.generate(p, max_tokens=2) for p in prompts))
        assert answers == [expected(p, 2) for p in prompts]
        await system.settled()


async def test_prompts_around_the_capacity_either_run_or_are_refused_and_block_nobody() -> None:
    # B014: one formula says what can ever fit; cancels clear what they waited for.
    capacity = 16 * 4
    async with local_system(
        local_config(), lambda size: fake_backend(size, num_blocks=16, max_model_len=128)
    ) as system:
        for length in range(capacity - 8, capacity + 6):
            prompt = [length % VOCAB_SIZE] * length
            for max_tokens in (1, 2):
                answer = await answer_or_refusal(system, prompt, max_tokens)
                fits = length + max_tokens - 1 <= capacity and (
                    max_tokens == 1 or length < capacity
                )
                assert answer == (expected(prompt, max_tokens) if fits else "refused")
        await system.settled()
        assert await system.generate([1], max_tokens=2) == expected([1], 2)


async def answer_or_refusal(
    system: LocalSystem, prompt: list[int], max_tokens: int
) -> list[int] | str:
    try:
        async with asyncio.timeout(5):
            return await system.generate(prompt, max_tokens=max_tokens)
    except InvalidRequest:
        return "refused"


async def test_a_full_worker_heals_by_its_own_clock() -> None:
    # B005: requests end at their deadline although nothing new is ever scheduled.
    gate = HoldAt("decoding")
    async with local_system(
        local_config(), lambda size: fake_backend(size, num_blocks=32), decode_gate=gate
    ) as system:
        calls = [
            asyncio.create_task(system.generate([i] * 60, max_tokens=60, deadline_s=0.5))
            for i in range(2)
        ]
        await gate.reached()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, AttemptFailed) for result in results), results
        await system.settled()


async def test_without_workers_requests_are_refused_at_once_and_served_once_they_are_back() -> None:
    async with local_system(local_config()) as system:
        stream = system.dial.streams.pop("decode-0")
        worker = system.dial.workers.pop("decode-0")
        stream.cut()
        while system.router.ready()[0]:
            await asyncio.sleep(0.005)
        with pytest.raises(Unavailable, match="no decode worker"):
            await system.generate(PROMPT)
        system.dial.workers["decode-0"] = worker
        await system.router.wait_ready(20)
        assert await system.generate(PROMPT) == expected(PROMPT, 8)


@pytest.mark.parametrize("roles", ["1P1D", "2P2D", "both"])
async def test_many_requests_come_and_go_and_every_answer_is_right(roles: str, seeded: int) -> None:
    rng = random.Random(seeded)
    count = 2 if roles == "2P2D" else 1
    config = local_config(
        prefill={"workers": 0 if roles == "both" else count, "block_size": 4},
        decode={"workers": count, "block_size": 8, "role": "both" if roles == "both" else "decode"},
        router={"max_attempts": 20},
    )
    shared = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(3)]

    async def one(system: LocalSystem) -> None:
        head = rng.choice(shared)[: rng.randrange(41)]
        prompt = head + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
        length, leave_after = rng.randrange(1, 30), rng.choice([None, None, 0, 1, 3])
        await asyncio.sleep(rng.random() * 0.3)
        tokens: list[int] = []
        async with aclosing(system.stream(prompt, max_tokens=length)) as steps:
            async for step in steps:
                if leave_after is not None and len(tokens) >= leave_after:
                    break
                tokens += step.token_ids
        assert tokens == expected(prompt, length)[: len(tokens)]
        if leave_after is None:
            assert len(tokens) == length

    async with local_system(
        config, lambda size: fake_backend(size, num_blocks=128 // size * 2)
    ) as system:
        await asyncio.gather(*(one(system) for _ in range(60)))
        await system.settled()
