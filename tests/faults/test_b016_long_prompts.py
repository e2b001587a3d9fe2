"""B016: prompts that fit one at a time run one after the other; none is computed over and over, and
short requests beside them go on.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine_model import expected
from local_system import fake_backend, local_config, local_system
from pressure_rig import PressureRig

from kvferry.engine.backend import Backend
from kvferry.engine.plan import StepPlan
from kvferry.engine.ports import Relief
from kvferry.engine.sequences import State

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


@pytest.mark.parametrize("slots", [0, 5, 40])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_long_prompts_beside_short_decodes(slots: int, budget: int) -> None:
    """On one worker: every step gives each running sequence its token, be there prompts or not; one
    may wait for a step that moves others' blocks out. Nothing is computed more than twice.
    """
    rig = PressureRig(24, slots, max_batch_tokens=budget, prefix_cache=False)
    short = [rig.submit([50 + i, 3, 5], 12) for i in range(3)]
    rig.turn()
    rig.turn()
    long = [rig.submit([i, *[7] * 47], 8) for i in range(3)]
    while any(not request.outcome for request in (*short, *long)):
        running = [request for request in short if rig.state(request) is State.DECODING]
        known = [len(request.tokens) for request in running]
        num_swaps = rig.role.preemptions[Relief.SWAP]
        assert rig.turn() or not running
        if rig.role.preemptions[Relief.SWAP] == num_swaps:
            assert [len(request.tokens) for request in running] == [n + 1 for n in known]
        rig.check()
    rig.check_end()
    for request in (*short, *long):
        assert max(request.computed.values()) <= 1 + request.given_back <= 2
