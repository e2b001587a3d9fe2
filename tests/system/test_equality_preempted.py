"""A request whose blocks are taken before any one of its steps answers as if they had not been.

float64, so that equal means equal: swapped to host memory, or given back to the router and computed
again, from separate pools and on a colocated worker, in every chunk of its prompt and at every
token.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_system import local_config, local_system
from preempting import PreemptAt
from tiny_system import TinyModel, make_tiny

from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.ports import Relief

pytestmark = pytest.mark.slow

PROMPT = [17, 40, 5, 5, 88, 23, 61, 9, 12, 70, 33]
NUM_TOKENS = 12
CHUNK = 4
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": NUM_TOKENS, "ignore_eos": True},
    "seeded": {
        "temperature": 0.9,
        "seed": 7,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "frequency_penalty": 0.4,
    },
}
NEIGHBOUR = [3, 3, 60, 18, 2, 44, 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen2")


def steps_of(roles: str) -> list[int]:
    """How many tokens have KV before each step on the decode worker."""
    last = len(PROMPT) + NUM_TOKENS - 1
    first = 0 if roles == "colocated" else len(PROMPT)
    chunks = range(first, len(PROMPT), CHUNK)
    return [*chunks, *range(len(PROMPT), last)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("relief", list(Relief))
@pytest.mark.parametrize("roles", ["PD", "colocated"])
async def test_preempted_before_each_step(
    roles: str, relief: Relief, prefix_cache: bool, sampling: str, tiny: TinyModel
) -> None:
    local = roles == "colocated"
    config = local_config(
        prefill={"workers": 0 if local else 1, "prefix_cache": prefix_cache},
        decode={
            "role": "both" if local else "decode",
            "block_size": 4,
            "prefix_cache": prefix_cache,
            "max_batch_tokens": CHUNK + 1,
        },
    )
    expected = tiny.answer(PROMPT, **SAMPLINGS[sampling]).token_ids
    gate = PreemptAt(relief)
    async with local_system(config, tiny.backends(swap_tokens=512), decode_gate=gate) as system:
        steps = steps_of(roles)
        for computed in steps:
            gate.arm(computed)
            assert await system.generate(PROMPT, **SAMPLINGS[sampling]) == expected, computed
            assert gate.num_taken == steps.index(computed) + 1
        await system.settled()
        decode = next(w for w in system.workers.values() if isinstance(w, DecodeWorker))
        assert decode.role.preemptions == {relief: len(steps)}
        attempts = {timeline.attempts for timeline in system.timelines}
        assert attempts == {1 if relief is Relief.SWAP else 2}


@pytest.mark.parametrize("relief", list(Relief))
async def test_neighbours_of_a_preempted_request_hear_nothing_of_it(
    relief: Relief, tiny: TinyModel
) -> None:
    config = local_config(
        prefill={"workers": 0}, decode={"role": "both", "max_batch_tokens": CHUNK + 1}
    )
    greedy = SAMPLINGS["greedy"]
    expected = [tiny.answer(prompt, **greedy).token_ids for prompt in (PROMPT, NEIGHBOUR)]
    gate = PreemptAt(relief)
    async with local_system(config, tiny.backends(swap_tokens=512), decode_gate=gate) as system:
        for computed in range(len(NEIGHBOUR) + NUM_TOKENS - 1):
            gate.arm(computed)  # of whichever comes to so many tokens first
            gone = asyncio.create_task(system.generate([9, *PROMPT], **greedy))
            pair = asyncio.gather(*(system.generate(p, **greedy) for p in (PROMPT, NEIGHBOUR)))
            await asyncio.sleep(0)
            gone.cancel()
            assert await pair == expected
            await asyncio.gather(gone, return_exceptions=True)
        await system.settled()


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn", "float32"])
async def test_other_types_of_caches_come_back_from_host_memory_whole(
    kv_dtype: str, tiny: TinyModel
) -> None:
    """Elements and scales: the answer is that of the same cache without pressure."""
    config = local_config(
        model={"dtype": "float64", "kv_dtype": kv_dtype},
        prefill={"workers": 0},
        decode={"role": "both", "block_size": 4, "prefix_cache": False, "max_batch_tokens": 5},
    )
    gate = PreemptAt(Relief.SWAP)
    backends = tiny.backends(kv_dtype=kv_dtype, swap_tokens=512)
    async with local_system(config, backends, decode_gate=gate) as system:
        calm = await system.generate(PROMPT, **SAMPLINGS["seeded"])
        for computed in (4, len(PROMPT), len(PROMPT) + 5):
            gate.arm(computed)
            assert await system.generate(PROMPT, **SAMPLINGS["seeded"]) == calm
        assert gate.num_taken == 3
        await system.settled()
