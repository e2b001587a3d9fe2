"""Several choices of one prompt: computed once, held once, and each its own from the first token.

The model is the fake one whose KV says what it is of: a block shared wrongly raises.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from gates import HoldAt, PreemptEvery, eventually
from local_system import VOCAB_SIZE, LocalSystem, fake_backend, local_config, local_system

from kvferry.engine.backend import Backend
from kvferry.engine.fake_runner import fake_next_token
from kvferry.engine.plan import StepPlan
from kvferry.engine.ports import Relief
from kvferry.router.siblings import Siblings

PROMPTS = {"ends with a block": list(range(20, 32)), "ends inside one": list(range(20, 34))}
COUNT = 5
NUM_TOKENS = 9
SAMPLED = {"temperature": 1.0, "seed": 3, "max_tokens": NUM_TOKENS}
POOLS: dict[str, dict[str, Any]] = {
    "separate": {"prefill": {"workers": 1}},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both"}},
}


def expected(prompt: list[int], index: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(fake_next_token(tokens, VOCAB_SIZE, 3, index))
    return tokens[len(prompt) :]


class Work:
    """Counts what workers compute, by context length."""

    def __init__(self) -> None:
        self.computed: Counter[int] = Counter()
        self.copies = 0

    def backend(self, **options: Any) -> Callable[[int], Backend]:
        return partial(fake_backend, before_execute=self._note, **options)

    def _note(self, plan: StepPlan) -> None:
        self.copies += len(plan.copies)
        for length, context in zip(plan.query_lens, plan.context_lens, strict=True):
            self.computed.update(range(context, context + length))


@pytest.mark.parametrize("pools", POOLS)
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_a_prompt_is_computed_and_shipped_once_for_all_its_choices(
    pools: str, prompt: list[int]
) -> None:
    work = Work()
    # Without a prefix cache nothing is shared but by siblings.
    uncached = {
        name: {"prefix_cache": False} | POOLS[pools].get(name, {}) for name in ("prefill", "decode")
    }
    config = local_config(**uncached)
    async with local_system(config, work.backend()) as system:
        # Long enough that the first still runs when the last of the others comes to share with it.
        answers = await system.choices(prompt, COUNT, **SAMPLED | {"max_tokens": 40})
        await system.settled()
    assert answers == [expected(prompt, index, 40) for index in range(COUNT)]
    assert len(set(map(tuple, answers))) == COUNT
    assert {work.computed[position] for position in range(len(prompt))} == {1}
    assert work.copies == (COUNT - 1) * (len(prompt) % 4 > 0)
    others = system.timelines[1:]
    assert {t.cached_tokens_decode for t in others} == {len(prompt)}
    assert all(t.attempts == 1 for t in system.timelines)
    if pools == "separate":
        assert [t.transfer_bytes > 0 for t in system.timelines] == [True] + [False] * (COUNT - 1)


@pytest.mark.parametrize("pools", POOLS)
async def test_blocks_of_the_prompt_are_held_once(pools: str) -> None:
    prompt = PROMPTS["ends with a block"]
    config = local_config(**POOLS[pools])
    async with local_system(config, fake_backend) as system:
        siblings = Siblings(COUNT)
        streams = [
            system.stream(prompt, i, siblings=siblings, **SAMPLED | {"max_tokens": 60})
            for i in range(COUNT)
        ]
        held = 0
        for _ in range(3):
            await asyncio.gather(*(anext(stream) for stream in streams))
            decode = next(name for name in system.workers if not name.startswith("prefill"))
            held = max(held, system.counts()[decode].in_use)
        for stream in streams:
            await stream.aclose()
        await system.settled()
    # Three blocks of the prompt, and some of its own for each choice; alone each had three more.
    assert held < COUNT * 3 + COUNT


async def test_one_token_each_takes_no_decode_worker() -> None:
    prompt = PROMPTS["ends inside one"]
    async with local_system(local_config(), fake_backend) as system:
        answers = await system.choices(prompt, COUNT, **SAMPLED | {"max_tokens": 1})
        await system.settled()
        assert system.counts()["decode-0"].free == 64
    assert answers == [expected(prompt, index, 1) for index in range(COUNT)]


@pytest.mark.parametrize("gone", [0, 2])
async def test_a_choice_that_is_cancelled_takes_no_other_with_it(gone: int) -> None:
    prompt = PROMPTS["ends inside one"]
    async with local_system(local_config(), fake_backend) as system:
        siblings = Siblings(COUNT)

        async def run(index: int) -> list[int]:
            steps = system.stream(prompt, index, siblings=siblings, **SAMPLED)
            found: list[int] = []
            async with aclosing(steps):
                async for step in steps:
                    found += step.token_ids
                    if index == gone:
                        break
            return found

        answers = await asyncio.gather(*map(run, range(COUNT)))
        await system.settled()
    for index, tokens in enumerate(answers):
        assert tokens == expected(prompt, index)[: 1 if index == gone else NUM_TOKENS]


async def test_choices_go_their_own_ways_when_the_first_fails_before_its_first_token() -> None:
    prompt = PROMPTS["ends inside one"]
    gate = HoldAt("waiting")
    async with local_system(local_config(), fake_backend, prefill_gate=gate) as system:
        siblings = Siblings(3)
        first = asyncio.create_task(drain(system, prompt, 0, siblings))
        others = [asyncio.create_task(drain(system, prompt, i, siblings)) for i in (1, 2)]
        await gate.reached()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.open()
        answers = await asyncio.gather(*others)
        await system.settled()
    assert answers == [expected(prompt, 1), expected(prompt, 2)]


async def test_a_fork_whose_parent_has_gone_is_computed_anew() -> None:
    prompt = PROMPTS["ends inside one"]
    gate = HoldAt("reserved")
    async with local_system(local_config(), fake_backend, decode_gate=gate) as system:
        siblings = Siblings(2)
        lead = asyncio.create_task(drain(system, prompt, 0, siblings))
        other = asyncio.create_task(drain(system, prompt, 1, siblings))
        await gate.reached()
        decode = system.workers["decode-0"].role
        await eventually(lambda: len(decode.sequences) == 2)
        lead.cancel()
        await asyncio.gather(lead, return_exceptions=True)
        gate.open()
        assert await other == expected(prompt, 1)
        await system.settled()


@pytest.mark.parametrize("pools", POOLS)
async def test_choices_whose_first_is_given_back_go_on(pools: str) -> None:
    """Those that wait for it hold reservations that its next attempt might have to wait for."""
    prompt = PROMPTS["ends inside one"]
    gate = PreemptEvery(Relief.GIVE_BACK)
    async with local_system(local_config(**POOLS[pools]), fake_backend, decode_gate=gate) as system:
        answers = await system.choices(prompt, COUNT, **SAMPLED)
        await system.settled()
    assert answers == [expected(prompt, index) for index in range(COUNT)]


async def drain(
    system: LocalSystem, prompt: list[int], index: int, siblings: Siblings
) -> list[int]:
    steps = system.stream(prompt, index, siblings=siblings, **SAMPLED)
    async with aclosing(steps):
        return [token async for step in steps for token in step.token_ids]
