"""B017: what a seed draws depends on seed and position alone, whoever shares the batch and whatever
becomes of its blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_system import LocalSystem, local_config, local_system
from preempting import PreemptAt
from tiny_system import TinyModel, make_tiny

from kvferry.engine.ports import Relief

pytestmark = pytest.mark.slow

PROMPT = [17, 40, 5, 5, 88, 23, 61, 9, 12, 70, 33]
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42, "max_tokens": 16, "ignore_eos": True}
UNSEEDED = [SEEDED | {"seed": seed, "temperature": 1.5} for seed in (2**63, 99, 0)]
"""A request without a seed is one whose seed the router has drawn."""
POOLS: dict[str, dict[str, Any]] = {
    "PD": {"decode": {"block_size": 8}},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both", "max_batch_tokens": 7}},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


async def beside(system: LocalSystem, before: list[dict[str, Any]], after: int) -> list[int]:
    """The seeded answer among neighbours that come before and after it."""
    neighbours = [
        asyncio.create_task(system.generate([3 + i, *PROMPT[:5]], **sampling))
        for i, sampling in enumerate(before)
    ]
    answer = asyncio.create_task(system.generate(PROMPT, **SEEDED))
    neighbours += [
        asyncio.create_task(system.generate([60 + i, 8, 1], **SEEDED | {"seed": i}))
        for i in range(after)
    ]
    await asyncio.gather(*neighbours)
    return await answer


@pytest.mark.parametrize("pools", POOLS)
async def test_alone_among_neighbours_and_preempted(pools: str, tiny: TinyModel) -> None:
    expected = tiny.answer(PROMPT, **SEEDED).token_ids
    for relief in Relief:
        gate = PreemptAt(relief)
        backends = tiny.backends(swap_tokens=512)
        async with local_system(local_config(**POOLS[pools]), backends, decode_gate=gate) as system:
            assert await beside(system, [], 0) == expected
            assert await beside(system, UNSEEDED[:1], 0) == expected
            assert await beside(system, UNSEEDED, 7) == expected
            for computed in (len(PROMPT), len(PROMPT) + 6):
                gate.arm(computed)
                assert await beside(system, [], 7) == expected
            assert gate.num_taken == 2
            await system.settled()


async def test_other_seeds_draw_other_tokens(tiny: TinyModel) -> None:
    async with local_system(local_config(), tiny.backends()) as system:
        answers = {
            tuple(await system.generate(PROMPT, **SEEDED | {"seed": seed})) for seed in range(4)
        }
    assert len(answers) == 4
