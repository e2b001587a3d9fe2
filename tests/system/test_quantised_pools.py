"""Pools whose caches are int8 or FP8: a request's tokens depend on nothing but that."""

from __future__ import annotations

from typing import Any

import pytest
from local_system import local_config, local_system
from tiny_models import VOCAB_SIZE
from tiny_system import TinyModel, make_tiny

from kvferry.engine.backend import Backend

PROMPTS = [[(7 * n + i * i) % VOCAB_SIZE for i in range(n)] for n in (5, 33)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "llama")


async def answers(tiny: TinyModel, kv_dtype: str, **sections: Any) -> list[list[int]]:
    """Each prompt, and then a second turn of it, whose prefix is cached."""
    config = local_config(model={"dtype": "float64", "kv_dtype": kv_dtype}, **sections)
    async with local_system(config, tiny.backends(kv_dtype=kv_dtype)) as system:
        found = []
        for prompt in PROMPTS:
            first = await system.generate(prompt, max_tokens=9, ignore_eos=True)
            found.append(first)
            found.append(await system.generate([*prompt, *first, 5], max_tokens=9, ignore_eos=True))
            assert system.timelines[-1].cached_tokens_prefill > 0
        await system.settled()
        return found


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
async def test_separate_pools_answer_as_a_colocated_one(tiny: TinyModel, kv_dtype: str) -> None:
    """Elements and scales arrive as they were sent; chunks and block sizes do not matter."""
    both = {"prefill": {"workers": 0}, "decode": {"role": "both", "block_size": 8}}
    together = await answers(tiny, kv_dtype, **both)
    apart = await answers(tiny, kv_dtype, prefill={"max_batch_tokens": 5}, decode={"block_size": 2})
    assert apart == together
    assert [len(answer) for answer in apart] == [9, 9, 9, 9]


async def test_a_wide_pool_fills_a_quantised_one(tiny: TinyModel) -> None:
    """Quantised on the way, once: the decode pool computes on from int8."""
    config = local_config(model={"dtype": "float64"}, decode={"kv_dtype": "int8"})
    assert config.kv_wire == "int8"

    def narrow(block_size: int) -> Backend:
        return tiny.backends(kv_dtype="int8")(block_size)

    async with local_system(config, tiny.backends(), decode_backend=narrow) as system:
        prompt = PROMPTS[1]
        tokens = await system.generate(prompt, max_tokens=9, ignore_eos=True)
        await system.settled()
    # The first token is the prefill pool's, which rounds nothing.
    exact = tiny.answer(prompt, max_tokens=1, ignore_eos=True)
    assert tokens[:1] == exact.token_ids
    assert len(tokens) == 9
