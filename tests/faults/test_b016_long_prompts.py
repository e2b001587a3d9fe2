"""B016: prompts that fit one at a time run one after the other; none is computed over and over, and
short requests beside them go on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine_model import expected
from local_system import fake_backend, local_config, local_system

from kvferry.engine.backend import Backend
from kvferry.engine.plan import StepPlan

LONG = 64
POOLS: dict[str, dict[str, Any]] = {
    "PD": {"prefill": {"prefix_cache": False}, "decode": {"prefix_cache": False}},
    "colocated": {
        "prefill": {"workers": 0},
        "decode": {"role": "both", "prefix_cache": False, "max_batch_tokens": 16},
    },
}


@pytest.mark.parametrize("pools", POOLS)
async def test_the_work_is_bounded(pools: str) -> None:
    computed = 0

    def count(plan: StepPlan) -> None:
        nonlocal computed
        computed += int(plan.query_lens[plan.query_lens > 1].sum())

    def backend(block_size: int) -> Backend:
        # One and a half long prompts.
        return fake_backend(block_size, num_blocks=24, before_execute=count)

    prompts = [[i, *[7] * (LONG - 1)] for i in range(3)]
    short = [[50 + i, 3, 5] for i in range(4)]
    async with local_system(local_config(**POOLS[pools]), backend) as system:
        answers = await asyncio.gather(
            *(system.generate(prompt, max_tokens=4) for prompt in prompts),
            *(system.generate(prompt, max_tokens=4) for prompt in short),
        )
        assert answers == [expected(prompt, 4) for prompt in (*prompts, *short)]
        await system.settled()
    whole = sum(map(len, (*prompts, *short)))
    assert whole - len(short) <= computed <= 2 * whole
