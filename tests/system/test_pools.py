"""Pools that differ - in block size, in the element type of their caches - and every way between
them give the tokens of one worker that does it all (B004).
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from fake_engine_model import VOCAB_SIZE, expected
from local_system import LocalSystem, fake_backend, local_config, local_system
from tiny_models import VOCAB_SIZE as TINY_VOCAB_SIZE
from tiny_system import TinyModel, make_tiny

from kvferry.core.dtypes import DTYPE_BYTES

pytestmark = pytest.mark.slow

BLOCKS = [(8, 32), (32, 8), (16, 24), (24, 16)]
DTYPES = [("float32", "float64"), ("float64", "float32"), ("float64", "float64")]
TRANSPORTS = ["loopback", "shm", "tcp", "gloo", "auto"]
TOKEN_ELEMENTS = 2 * 2 * 4
"""Of the fake model: layers, K and V, head size."""


def config_of(blocks: tuple[int, int], dtypes: tuple[str, str], **transfer: Any) -> Any:
    return local_config(
        prefill={"block_size": blocks[0], "kv_dtype": dtypes[0]},
        decode={"block_size": blocks[1], "kv_dtype": dtypes[1]},
        transfer=transfer,
    )


def fakes(dtypes: tuple[str, str]) -> dict[str, Any]:
    def make(name: str) -> Any:
        return lambda size: fake_backend(size, dtype=getattr(torch, name))

    return {"backend": make(dtypes[0]), "decode_backend": make(dtypes[1])}


async def conversations(system: LocalSystem, rng: random.Random) -> None:
    """Prompts that end anywhere in a block, then follow-ups that find prefixes on both sides."""
    prompts = [[i, *(rng.randrange(VOCAB_SIZE) for _ in range(7 * i))] for i in range(1, 10)]
    answers = await asyncio.gather(*(system.generate(p, max_tokens=9) for p in prompts))
    assert answers == [expected(p, 9) for p in prompts]
    follow_ups = [[*p, *a, 5, 6] for p, a in zip(prompts, answers, strict=True)]
    answers = await asyncio.gather(*(system.generate(p, max_tokens=5) for p in follow_ups))
    assert answers == [expected(p, 5) for p in follow_ups]
    assert {timeline.attempts for timeline in system.timelines} == {1}
    await system.settled()


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
async def test_pools_of_other_shapes(
    blocks: tuple[int, int], dtypes: tuple[str, str], seeded: int
) -> None:
    async with local_system(config_of(blocks, dtypes), **fakes(dtypes)) as system:
        await conversations(system, random.Random(seeded))
        wire = min(dtypes, key=DTYPE_BYTES.__getitem__)
        first = system.timelines[0]
        assert first.transfer_bytes == first.prompt_tokens * TOKEN_ELEMENTS * DTYPE_BYTES[wire]


@pytest.mark.parametrize("push", ["layers", "whole"])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_way_there(transport: str, push: str, seeded: int) -> None:
    config = config_of(
        (8, 32),
        ("float32", "float64"),
        transport=transport,
        push=push,
        trusted_network=transport == "gloo",
        slab="4KiB",
    )
    async with local_system(config, **fakes(("float32", "float64"))) as system:
        await conversations(system, random.Random(seeded))
        used = {timeline.transfer_transport for timeline in system.timelines}
        assert used == {"shm" if transport == "auto" else transport}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), "qwen3")


async def tiny_answers(system: LocalSystem, prompts: list[list[int]]) -> list[list[int]]:
    answers = await asyncio.gather(*(system.generate(p, max_tokens=8) for p in prompts))
    await system.settled()
    return answers


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("blocks", [(8, 32), (24, 16)], ids=str)
async def test_a_real_model_answers_as_one_worker_does(
    blocks: tuple[int, int], dtypes: tuple[str, str], tiny: TinyModel
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(TINY_VOCAB_SIZE) for _ in range(9 * i)] for i in range(1, 8)]
    colocated = local_config(prefill={"workers": 0}, decode={"role": "both"})
    async with local_system(colocated, tiny.backends()) as system:
        answers = await tiny_answers(system, prompts)
    sides = {
        "backend": tiny.backends(kv_dtype=dtypes[0]),
        "decode_backend": tiny.backends(kv_dtype=dtypes[1]),
    }
    async with local_system(config_of(blocks, dtypes), **sides) as system:
        assert await tiny_answers(system, prompts) == answers


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
async def test_a_lossy_wire_works_and_its_blocks_have_names_of_their_own(
    wire: str, tiny: TinyModel
) -> None:
    both = ("float64", "float64")
    exact, lossy = config_of((8, 16), both), config_of((8, 16), both, wire_dtype=wire)
    prompt = list(range(10, 50))
    async with local_system(exact, tiny.backends()) as system:
        exact_root = system.workers["decode-0"].hello.root_hash
        prefill_root = system.workers["prefill-0"].hello.root_hash
        tokens = await system.generate(prompt)
        exact_bytes = system.timelines[0].transfer_bytes
    assert exact_root == prefill_root
    async with local_system(lossy, tiny.backends()) as system:
        assert system.workers["prefill-0"].hello.root_hash == prefill_root
        assert system.workers["decode-0"].hello.root_hash != exact_root
        found = await system.generate(prompt)
        assert system.timelines[0].transfer_bytes <= exact_bytes / 2
        # The first one comes from KV that never travelled.
        assert len(found) == len(tokens)
        assert found[0] == tokens[0]
        if wire == "float32":
            assert found == tokens
        again = await system.generate(prompt)
        assert again == found
        assert system.timelines[1].cached_tokens_decode == 32
        await system.settled()


def test_nothing_is_lossy_unless_asked_for() -> None:
    config = local_config()
    assert config.transfer.wire_dtype is None
    assert config.kv_wire == config.kv_dtype(config.prefill) == config.kv_dtype(config.decode)
