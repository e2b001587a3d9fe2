"""Several choices as one stream, and nothing left running however it is left."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from fake_engine import ANSWER, ByteCodec, FakeEngine, Hold, script

from kvferry.core.errors import DeadlineExceeded, Overloaded, ProtocolError, WorkerLost
from kvferry.core.request import FinishReason, TextDelta, TokenStep
from kvferry.router.choices import UsageMeter, generate_text
from kvferry.router.intake import Intake, PreparedPrompt

NO_SAMPLING: dict[str, object] = {}


async def collect(
    engine: FakeEngine, prompts: list[PreparedPrompt], seen: list[TextDelta] | None = None
) -> list[TextDelta]:
    seen = [] if seen is None else seen
    async with aclosing(generate_text(engine, ByteCodec(), prompts)) as deltas:
        async for delta in deltas:
            seen.append(delta)
    return seen


def texts(deltas: list[TextDelta]) -> dict[int, str]:
    found: dict[int, str] = {}
    for delta in deltas:
        found[delta.index] = found.get(delta.index, "") + delta.text
    return found


def only_this_task() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


async def test_choices_of_several_prompts(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, i: script(f"{bytes(request.prompt_token_ids).decode()}{i}")
    prompts = await intake.completion(["x", "yy"], {"n": 3})
    deltas = await collect(engine, prompts)
    assert texts(deltas) == {0: "x0", 1: "x1", 2: "x2", 3: "yy0", 4: "yy1", 5: "yy2"}
    last = [delta for delta in deltas if delta.finish_reason is not None]
    assert sorted(delta.index for delta in last) == list(range(6))
    assert {delta.timeline.prompt_tokens for delta in last if delta.timeline} == {1, 2}
    meter = UsageMeter(prompts)
    for delta in deltas:
        meter.add(delta)
    assert meter.usage.prompt_tokens == 3
    assert meter.usage.completion_tokens == 3 * 3 + 3 * 4
    assert meter.usage.cached_tokens == 2 + 2
    assert engine.closed_early == 0
    assert only_this_task()


async def test_stop_string_closes_the_engine_and_counts_what_it_cut(
    engine: FakeEngine, intake: Intake
) -> None:
    engine.script = lambda request, index: [*script("abcdef")[:4], Hold()]
    prompts = await intake.completion("x", {"stop": ["cd"]})
    deltas = await collect(engine, prompts)
    assert texts(deltas) == {0: "ab"}
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, "cd")
    assert engine.closed_early == 1
    assert engine.running == 0
    meter = UsageMeter(prompts)
    for delta in deltas:
        meter.add(delta)
    assert meter.usage.completion_tokens == 4


async def test_an_error_comes_after_the_text_before_it_and_ends_all(
    engine: FakeEngine, intake: Intake
) -> None:
    hold = Hold()
    engine.script = lambda request, i: [hold] if i else [*script("ab")[:2], WorkerLost("gone")]
    prompts = await intake.completion("x", {"n": 4})
    seen: list[TextDelta] = []
    with pytest.raises(WorkerLost, match="gone"):
        await collect(engine, prompts, seen)
    assert texts(seen) == {0: "ab"}
    assert engine.running == 0
    assert only_this_task()


async def test_closing_early_ends_all(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, index: [TokenStep((65,)), Hold()]
    deltas = generate_text(engine, ByteCodec(), await intake.completion("x", {"n": 3}))
    assert (await anext(deltas)).text == "A"
    await deltas.aclose()
    assert engine.running == 0
    assert engine.closed_early == 3
    assert only_this_task()


@pytest.mark.parametrize("num_steps", [0, 1])
async def test_cancelling_ends_all(engine: FakeEngine, intake: Intake, num_steps: int) -> None:
    hold = Hold()
    engine.script = lambda request, index: [*[TokenStep((65,))] * num_steps, hold]
    prompts = await intake.completion("x", {"n": 3})
    task = asyncio.create_task(collect(engine, prompts))
    await hold.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.running == 0
    assert only_this_task()


async def test_deadline(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, index: [TokenStep((65,)), Hold()]
    prompts = await intake.completion("x", {"n": 2}, deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await collect(engine, prompts)
    assert engine.running == 0


async def test_error_at_once(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, index: [Overloaded("queue is full")]
    with pytest.raises(Overloaded):
        await collect(engine, await intake.completion("x", NO_SAMPLING))


async def test_an_engine_that_forgets_to_finish(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, index: [TokenStep((65,))]
    with pytest.raises(ProtocolError, match="without a finish reason"):
        await collect(engine, await intake.completion("x", NO_SAMPLING))


async def test_a_defect_of_the_engine_is_not_hidden(engine: FakeEngine, intake: Intake) -> None:
    engine.script = lambda request, index: [ZeroDivisionError("defect")]
    with pytest.raises(ZeroDivisionError):
        await collect(engine, await intake.completion("x", {"n": 2}))
    assert engine.running == 0
    assert only_this_task()


async def test_a_slow_client_gets_joined_deltas(engine: FakeEngine, intake: Intake) -> None:
    """While it is away the choice runs on; what it missed comes as one delta per choice."""
    prompts = await intake.completion("x", NO_SAMPLING)
    async with aclosing(generate_text(engine, ByteCodec(), prompts)) as deltas:
        first = await anext(deltas)
        await engine.idle()
        rest = [delta async for delta in deltas]
    assert len(rest) <= 2
    assert first.text + "".join(delta.text for delta in rest) == ANSWER
    assert rest[-1].finish_reason is FinishReason.STOP
