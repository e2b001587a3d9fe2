"""``model.deterministic``: a request's numbers do not depend on anything but the request.

float32 on the CPU, by the compiled kernels: tokens and log-probabilities are the same bit for bit
whatever the batch, the chunks, cached prefixes, the pools, the neighbours and the pressure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gates import PreemptEvery
from local_system import local_config, local_system
from rank_workers import rank_threads
from tiny_models import VOCAB_SIZE, save, some_tokens, tiny_model

from kvferry.core.config import ModelConfig, PoolConfig
from kvferry.core.errors import ConfigError
from kvferry.core.request import TokenStep
from kvferry.engine.backend import Backend
from kvferry.engine.loading import load_backend, load_part
from kvferry.engine.ports import Relief
from kvferry.kernels.cpu.library import cpu_ops
from kvferry.models.packed import pack_weights

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(cpu_ops() is None, reason="the installation has no compiled CPU kernels"),
]

PROMPTS = [some_tokens(length, seed=length).tolist() for length in (5, 19, 33, 34)]
SAMPLING: dict[str, Any] = {"temperature": 0.9, "seed": 4, "max_tokens": 9, "logprobs": 3}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "one token at a time": {"prefill": {"max_batch_tokens": 1}},
    "chunks of seven": {"prefill": {"max_batch_tokens": 7, "block_size": 2}},
    "whole prompts together": {"prefill": {"max_batch_tokens": 128, "block_size": 16}},
    "two threads": {"prefill": {"threads": 2}, "decode": {"threads": 2}},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both", "max_batch_tokens": 24}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        path = save(
            tiny_model("llama", torch.float32, max_position_embeddings=128),
            tmp_path_factory.mktemp("tiny"),
        )
        pack_weights(path, torch.float32)
        yield path


def backends(folder: Path) -> Callable[[int], Backend]:
    model = ModelConfig(dtype="float32", deterministic=True)

    def load(block_size: int) -> Backend:
        pool = PoolConfig(block_size=block_size, kv_memory="2MiB")
        return load_backend(folder, VOCAB_SIZE, model, pool, "pool")

    return load


def numbers(steps: list[TokenStep]) -> list[tuple[Any, ...]]:
    """All that an answer says, to the last bit."""
    return [
        (step.token_ids, [(lp.token_id, lp.logprob, lp.top) for lp in step.logprobs])
        for step in steps
    ]


async def answers(
    folder: Path, sections: dict[str, dict[str, Any]], gate: Any = None, together: bool = True
) -> list[list[tuple[Any, ...]]]:
    config = local_config(**sections, model={"dtype": "float32", "deterministic": True})
    async with local_system(config, backends(folder), decode_gate=gate) as system:
        if together:
            found = await asyncio.gather(*(system.steps(p, **SAMPLING) for p in PROMPTS))
        else:
            found = [await system.steps(prompt, **SAMPLING) for prompt in PROMPTS]
        await system.settled()
    return [numbers(steps) for steps in found]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[tuple[Any, ...]]]:
    """Each request by itself."""
    return asyncio.run(answers(folder, {}, together=False))


@pytest.mark.parametrize("setting", SETTINGS)
async def test_answers_are_those_of_each_request_alone(
    setting: str, folder: Path, alone: list[list[tuple[Any, ...]]]
) -> None:
    assert await answers(folder, SETTINGS[setting]) == alone


@pytest.mark.parametrize("relief", Relief)
@pytest.mark.parametrize("setting", ["chunks of seven", "colocated"])
async def test_nor_does_pressure_change_a_bit(
    relief: Relief, setting: str, folder: Path, alone: list[list[tuple[Any, ...]]]
) -> None:
    gate = PreemptEvery(relief)
    assert await answers(folder, SETTINGS[setting], gate) == alone
    assert gate.count


@pytest.mark.parametrize("setting", ["one token at a time", "chunks of seven"])
async def test_for_one_number_of_ranks_the_same_holds(setting: str, folder: Path) -> None:
    """Two ranks add up in another order than one, but always in theirs."""
    whole = await on_two_ranks(folder, SETTINGS["whole prompts together"])
    assert await on_two_ranks(folder, SETTINGS[setting]) == whole


async def on_two_ranks(
    folder: Path, sections: dict[str, dict[str, Any]]
) -> list[list[tuple[Any, ...]]]:
    config = local_config(
        model={"dtype": "float32", "deterministic": True},
        prefill={"tp": 2, "kv_memory": "2MiB"} | sections["prefill"],
        decode={"tp": 2, "kv_memory": "2MiB"},
        transfer={"transport": "tcp"},
        cluster={"silence_s": 60.0},
    )
    with rank_threads(folder, config) as ranks:
        prefill, decode = ranks.backend("prefill"), ranks.backend("decode")
        async with local_system(config, prefill, decode_backend=decode) as system:
            found = await asyncio.gather(*(system.steps(p, **SAMPLING) for p in PROMPTS))
            await system.settled()
    return [numbers(steps) for steps in found]


async def test_nor_does_a_cached_prefix(folder: Path, alone: list[list[tuple[Any, ...]]]) -> None:
    config = local_config(model={"dtype": "float32", "deterministic": True})
    async with local_system(config, backends(folder)) as system:
        for _ in range(2):
            steps = await system.steps(PROMPTS[2], **SAMPLING)
            assert numbers(steps) == alone[2]
        assert system.timelines[1].cached_tokens_prefill == 32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_without_such_kernels_are_refused(folder: Path, dtype: str) -> None:
    model = ModelConfig(dtype=dtype, deterministic=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"model.deterministic: .*{dtype}.*float64"):
        load_part(folder, VOCAB_SIZE, model, PoolConfig(), "pool")


def test_weights_that_are_not_packed_are_refused(tmp_path: Path) -> None:
    odd = save(tiny_model("llama", torch.float32, intermediate_size=100), tmp_path)
    pack_weights(odd, torch.float32)
    model = ModelConfig(dtype="float32", deterministic=True)
    with pytest.raises(ConfigError, match=r"model.deterministic: a matrix of .* is not in panels"):
        load_part(odd, VOCAB_SIZE, model, PoolConfig(), "pool")


def test_float64_is_let_through(tmp_path: Path) -> None:
    exact = save(tiny_model("llama", torch.float64), tmp_path)
    model = ModelConfig(dtype="float64", deterministic=True)
    assert load_part(exact, VOCAB_SIZE, model, PoolConfig(), "pool").kv.num_blocks
