"""Sampling through the system: seeds, neighbours, recovery, distribution, log-probabilities, edits
(B017).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import pytest
from gates import HoldAt
from local_system import LocalSystem, local_config, local_system
from reference_loop import next_logits, probabilities
from tiny_models import VOCAB_SIZE
from tiny_system import EOS, TinyModel, make_tiny, sampling_params

from kvferry.client.client import KvferryClient
from kvferry.core.request import FinishReason, TokenLogprob
from kvferry.core.sampling import SamplingParams

pytestmark = pytest.mark.slow

PROMPT = [17, 40, 5, 5, 88, 23, 61, 9, 12, 70, 33]
NUM_BINS = 20
CRITICAL = 43.8
"""Chi-square with 19 degrees of freedom exceeds it once in a thousand times."""
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 24, "ignore_eos": True}
ROLES = ("PD", "colocated")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2")


@asynccontextmanager
async def serving(tiny: TinyModel, roles: str, **options: Any) -> AsyncIterator[LocalSystem]:
    local = roles == "colocated"
    sections = options.pop("sections", {})
    decode = {"role": "both" if local else "decode", "block_size": 8} | sections.pop("decode", {})
    config = local_config(prefill={"workers": 0 if local else 1}, decode=decode, **sections)
    async with local_system(config, tiny.backends(**options)) as system:
        yield system
        await system.settled()


# B017: what is drawn depends on the seed and the position, and on nothing else.


@pytest.mark.parametrize("roles", ROLES)
async def test_neighbours_do_not_change_what_a_seed_draws(
    roles: str, tiny: TinyModel, seeded: int
) -> None:
    rng = random.Random(seeded)
    expected = tiny.answer(PROMPT, **SEEDED).token_ids
    async with serving(tiny, roles) as system:
        assert await system.generate(PROMPT, **SEEDED) == expected
        for _ in range(4):
            neighbours: list[dict[str, Any]] = [{"temperature": 0.0}]
            neighbours += [{"temperature": 0.8, "seed": s} for s in rng.sample(range(100), 7)]
            neighbours += [{"temperature": 0.7, "top_p": 0.5, "logprobs": 3, "seed": 42}]
            calls = [
                (PROMPT[: rng.randrange(1, len(PROMPT))], other | {"max_tokens": 20})
                for other in neighbours
            ]
            calls.insert(rng.randrange(len(calls)), (PROMPT, SEEDED))
            rng.shuffle(calls)
            answers = await asyncio.gather(
                *(system.generate(prompt, **sampling) for prompt, sampling in calls)
            )
            for (prompt, sampling), tokens in zip(calls, answers, strict=True):
                assert tokens == tiny.answer(prompt, tokens, **sampling).token_ids, sampling


async def test_neighbours_without_a_seed_over_the_real_api(tiny: TinyModel) -> None:
    """Here the router draws the seeds that are missing: each request gets another."""
    expected = tiny.answer(PROMPT, **SEEDED).token_ids
    unseeded = SamplingParams(temperature=2.0, max_tokens=24, ignore_eos=True)
    async with (
        serving(tiny, "PD") as system,
        system.apis() as (address, _),
        KvferryClient(address) as client,
    ):

        async def tokens(params: SamplingParams) -> tuple[int, ...]:
            deltas = [delta async for delta in client.generate(PROMPT, params)]
            return tuple(token for delta in deltas for token in delta.token_ids)

        for position in (0, 3):
            params = [unseeded] * 7
            params.insert(position, SamplingParams(**SEEDED))
            answers = await asyncio.gather(*map(tokens, params))
            assert list(answers.pop(position)) == expected
            assert len(set(answers)) == 7


@pytest.mark.parametrize("roles", ROLES)
async def test_every_choice_of_a_request_has_noise_of_its_own(roles: str, tiny: TinyModel) -> None:
    async def choice(system: LocalSystem, index: int) -> tuple[int, ...]:
        async with aclosing(system.stream(PROMPT, sample_index=index, **SEEDED)) as steps:
            return tuple([token async for step in steps for token in step.token_ids])

    async with serving(tiny, roles) as system:
        choices = await asyncio.gather(*(choice(system, index) for index in range(4)))
    assert len(set(choices)) == 4
    for index, tokens in enumerate(choices):
        answer = tiny.answer(PROMPT, tokens, sample_index=index, **SEEDED)
        assert list(tokens) == answer.token_ids


@pytest.mark.parametrize("lost", ["prefill-0", "decode-0", "both-0"])
@pytest.mark.parametrize("after", [1, 9])
async def test_a_lost_worker_does_not_change_what_a_seed_draws(
    lost: str, after: int, tiny: TinyModel
) -> None:
    sampling = SEEDED | {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 10}
    expected = tiny.answer(PROMPT, **sampling).token_ids
    async with serving(tiny, "colocated" if lost == "both-0" else "PD") as system:
        tokens: list[int] = []
        async with aclosing(system.stream(PROMPT, **sampling)) as steps:
            async for step in steps:
                tokens += step.token_ids
                if len(tokens) == after:
                    system.dial.streams[lost].cut()
        assert tokens == expected


@pytest.mark.parametrize("roles", ROLES)
async def test_preemption_does_not_change_what_a_seed_draws(roles: str, tiny: TinyModel) -> None:
    # Six sequences of up to 71 tokens on room for 128.
    sections = {"decode": {"growth_tokens": 4}, "router": {"max_attempts": 20}}
    async with serving(tiny, roles, num_tokens=128, sections=sections) as system:
        sampling = [SEEDED | {"seed": seed, "max_tokens": 60} for seed in range(6)]
        prompts = [[seed, *PROMPT[1:]] for seed in range(6)]
        answers = await asyncio.gather(
            *(system.generate(p, **s) for p, s in zip(prompts, sampling, strict=True))
        )
        for prompt, tokens, values in zip(prompts, answers, sampling, strict=True):
            assert tokens == tiny.answer(prompt, tokens, **values).token_ids
        preempted = sum(timeline.attempts - 1 for timeline in system.timelines)
    assert preempted > 0, "the pool was too large for this test to mean anything"


# The distribution is the one the parameters describe.


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 12},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.05},
    ],
    ids=["plain", "top_k", "top_p", "min_p"],
)
async def test_draws_follow_the_exact_probabilities(
    sampling: dict[str, Any], tiny: TinyModel
) -> None:
    """The first token is drawn on P, the second on D."""
    draws, sampling = 200, sampling | {"max_tokens": 2, "ignore_eos": True}
    async with serving(tiny, "PD") as system:
        answers = await asyncio.gather(
            *(system.generate(PROMPT, seed=seed, **sampling) for seed in range(draws))
        )
    params = sampling_params(**sampling)
    logits = cache(lambda *tokens: next_logits(tiny.transformers)([*PROMPT, *tokens]))
    within = random.Random(3)
    for position, worker in enumerate(("P", "D")):
        places = [
            place(answer[position], probabilities(logits(*answer[:position]), params), within)
            for answer in answers
        ]
        bins = Counter(int(place * NUM_BINS) for place in places)
        wanted = draws / NUM_BINS
        statistic = sum((bins[i] - wanted) ** 2 / wanted for i in range(NUM_BINS))
        print(f"{worker}: chi-square {statistic:.1f}, critical {CRITICAL}")
        assert statistic < CRITICAL


def place(token: int, exact: dict[int, float], within: random.Random) -> float:
    """Where the token lies in the cumulative distribution, most likely tokens first, and at random
    within its own share: uniform in [0, 1) whatever the distribution, if it is drawn from that.
    """
    assert token in exact, "a token was drawn that the filters leave out"
    likelier = itertools.takewhile(lambda other: other != token, exact)
    before = sum(exact[other] for other in likelier)
    return min(before + within.random() * exact[token], 1 - 1e-12)


# Log-probabilities and edits.


def assert_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
        assert dict(ours.top) == pytest.approx(dict(theirs.top), abs=1e-5)


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "top_p": 0.7, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("num_top", [0, 5, 20])
async def test_logprobs_are_the_reference_s(
    roles: str, sampling: dict[str, Any], num_top: int, tiny: TinyModel
) -> None:
    """Before temperature and filters, from P for the first token and from D for the others."""
    expected = tiny.answer(PROMPT, logprobs=num_top, **sampling)
    async with serving(tiny, roles) as system:
        neighbour = asyncio.create_task(system.generate(PROMPT[3:], max_tokens=20))
        steps = await system.steps(PROMPT, logprobs=num_top, **sampling)
        plain = await system.steps(PROMPT, **sampling)
        await neighbour
    assert [t for step in steps for t in step.token_ids] == expected.token_ids
    assert_logprobs([entry for step in steps for entry in step.logprobs], expected.logprobs)
    assert not any(step.logprobs for step in plain)


FAVOURED, UNWANTED = 77, 40
EDITS: dict[str, dict[str, Any]] = {
    "bias for": {"logit_bias": {FAVOURED: 4.5, 3: 1.25}},
    "bias against": {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 2), -100.0)},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.9},
    "negative": {"presence_penalty": -2.0, "frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.6},
    "all at once": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {FAVOURED: 2.0, UNWANTED: -3.0},
        "min_tokens": 6,
        "stop_token_ids": (FAVOURED,),
    },
    "min_tokens holds the end back": {"logit_bias": {EOS: 50.0}, "min_tokens": 5},
    "min_tokens and ignore_eos": {"logit_bias": {EOS: 6.0}, "min_tokens": 5, "ignore_eos": True},
    "first token stops": {"logit_bias": {FAVOURED: 90.0}, "stop_token_ids": (FAVOURED,)},
    "first token stops only later": {
        "logit_bias": {FAVOURED: 90.0},
        "stop_token_ids": (FAVOURED, UNWANTED),
        "min_tokens": 3,
    },
    "stop token on the last place": {
        "logit_bias": {FAVOURED: 90.0},
        "stop_token_ids": (FAVOURED,),
        "min_tokens": 15,
    },
}


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("kind", EDITS)
async def test_edits_and_stop_rules_are_the_reference_s(
    kind: str, roles: str, tiny: TinyModel
) -> None:
    async with serving(tiny, roles) as system:
        # In one batch, so that one row's edits would be seen in the other's.
        samplings = [
            EDITS[kind] | {"max_tokens": 16},
            EDITS[kind] | {"max_tokens": 16, "temperature": 1.1, "seed": 9},
            {"max_tokens": 16},
        ]
        answers = await asyncio.gather(*(system.steps(PROMPT, **s) for s in samplings))
    plain = tiny.answer(PROMPT, max_tokens=16).token_ids
    for steps, sampling in zip(answers, samplings, strict=True):
        tokens = [token for step in steps for token in step.token_ids]
        expected = tiny.answer(PROMPT, tokens, **sampling)
        assert tokens == expected.token_ids, sampling
        assert steps[-1].finish_reason is expected.finish_reason
        assert (tokens != plain) == (sampling != samplings[-1]), "the edit changed nothing"


async def test_a_stop_token_ends_both_sides(tiny: TinyModel) -> None:
    """B008 on a real model: from P at once, from D in the middle."""
    greedy = tiny.answer(PROMPT, max_tokens=16, ignore_eos=True).token_ids
    gate = HoldAt()
    config = local_config()
    async with local_system(config, tiny.backends(), decode_gate=gate) as system:
        first = await system.steps(PROMPT, max_tokens=16, stop_token_ids=(greedy[0],))
        assert [step.token_ids for step in first] == [(greedy[0],)]
        assert first[-1].finish_reason is FinishReason.STOP
        assert "decoding" not in gate.seen
        stop = next(token for token in greedy[3:] if token not in greedy[:3])
        later = await system.generate(PROMPT, max_tokens=16, stop_token_ids=(stop,))
        assert later == greedy[: greedy.index(stop) + 1]
        await system.settled()
