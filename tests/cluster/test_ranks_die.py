"""Tensor-parallel workers as Ray actors: answers, and what becomes of one that loses a rank."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from gates import eventually
from ray_marks import RAY
from tiny_models import save, tiny_model
from tiny_tokenizer import save_tokenizer
from whole_cluster import PROMPT, blocks_are_back, config_for, ready, tokens

from kvferry.client.client import KvferryClient
from kvferry.cluster.system import System
from kvferry.core.errors import ConfigError
from kvferry.core.sampling import SamplingParams

pytestmark = [*RAY, pytest.mark.timeout(300)]

LONG = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
KINDS = ("PrefillActor", "PrefillRankActor", "DecodeActor", "DecodeRankActor")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(tiny_model("llama", torch.float64, max_position_embeddings=128), path)
    save_tokenizer(path)
    return path


def pids(kind: str) -> list[int]:
    """Of the processes whose Ray title shows this actor class."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title = (process / "cmdline").read_text()
        except OSError:
            continue
        if f"::{kind}" in title:
            found.append(int(process.name))
    return found


async def test_a_rank_dies_in_mid_stream_and_its_worker_comes_back(folder: Path) -> None:
    said: list[str] = []
    config = config_for(
        folder, model={"path": str(folder), "dtype": "float64"}, prefill={"tp": 2}, decode={"tp": 2}
    )
    async with (
        System(config, report=said.append) as system,
        KvferryClient(system.grpc_address) as client,
    ):
        answer = await tokens(client)
        before = {kind: pids(kind) for kind in KINDS}
        assert [len(found) for found in before.values()] == [1, 1, 1, 1]

        for worker, kind in (("decode-0", "DecodeRankActor"), ("prefill-0", "PrefillRankActor")):
            running = asyncio.create_task(long_answer(client))
            await asyncio.sleep(0.2)
            os.kill(pids(kind)[0], signal.SIGKILL)
            # In flight when it died, or not: it is answered whole, by the worker that came back.
            assert len(await running) == 90
            await eventually(lambda w=worker: any(f"{w} is back" in s for s in said), 120)
            await ready(client)
            assert await tokens(client) == answer
            assert [len(pids(k)) for k in KINDS] == [1, 1, 1, 1]
        await blocks_are_back(client)
        last = [pid for kind in KINDS for pid in pids(kind)]
    assert not ray.is_initialized()
    await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in last))


async def test_more_ranks_than_heads_fail_the_start_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"prefill.tp: 5 ranks .* 4 query heads"):
        async with System(config_for(folder, prefill={"tp": 5}), report=lambda stage: None):
            pass
    assert not ray.is_initialized()


async def long_answer(client: KvferryClient) -> list[int]:
    found: list[int] = []
    async for response in client.generate(PROMPT, LONG):
        found += response.token_ids
    return found
