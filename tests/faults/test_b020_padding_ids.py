"""B020: ids outside the tokenizer's vocabulary are refused even where the embedding has rows for
them, and those padding rows are never sampled, however likely the model makes them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import torch
from fake_engine import ByteCodec
from local_system import local_config, local_system
from tiny_models import VOCAB_SIZE, reference_logits, save, tiny_model

from kvferry.core.config import ModelConfig, PoolConfig
from kvferry.engine.backend import Backend
from kvferry.engine.loading import load_backend
from kvferry.proto import kvferry_pb2, kvferry_pb2_grpc

pytestmark = pytest.mark.slow

TOKENIZER_SIZE = VOCAB_SIZE - 6
PROMPT = list(range(3, 20))
BAD_KEYS = [
    str(TOKENIZER_SIZE),
    str(VOCAB_SIZE - 1),
    str(VOCAB_SIZE),
    "1000000",
    "-1",
    "abc",
    "1.5",
]


class SmallCodec(ByteCodec):
    vocab_size = TOKENIZER_SIZE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that would say nothing but padding, if it could."""
    torch.set_num_threads(1)
    model = tiny_model("llama", torch.float64, max_position_embeddings=128, eos_token_id=None)
    head = model.lm_head.weight.data
    head[TOKENIZER_SIZE:] *= 100
    assert reference_logits(model, torch.tensor(PROMPT))[-1].argmax() >= TOKENIZER_SIZE
    return save(model, tmp_path_factory.mktemp("padded"))


def backend(folder: Path, block_size: int) -> Backend:
    model = ModelConfig(dtype="float64", max_model_len=128)
    pool = PoolConfig(block_size=block_size, kv_memory=2**20)
    return load_backend(folder, TOKENIZER_SIZE, model, pool, "pool")


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | fields


async def test_bad_ids_are_refused_and_the_engine_goes_on(folder: Path) -> None:
    async with (
        local_system(local_config(), partial(backend, folder)) as system,
        system.apis(SmallCodec()) as (address, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        neighbour = asyncio.create_task(system.generate(PROMPT, max_tokens=60))
        for key in BAD_KEYS:
            answer = await client.post("/v1/completions", json=body(logit_bias={key: 1}))
            assert answer.status_code == 400, key
            assert answer.json()["error"]["param"] == f"logit_bias.{key}"
        for value in (1e9, -1e9, 100.5, None, "1", True):
            answer = await client.post("/v1/completions", json=body(logit_bias={"5": value}))
            assert answer.status_code == 400, value
            assert answer.json()["error"]["param"] == "logit_bias.5"
        stub = kvferry_pb2_grpc.KvferryStub(channel)
        for token in (TOKENIZER_SIZE, VOCAB_SIZE, 10**6):
            sampling = kvferry_pb2.SamplingParams(logit_bias={token: 1.0})
            request = kvferry_pb2.GenerateRequest(text="x", sampling=sampling)
            with pytest.raises(grpc.aio.AioRpcError, match="logit_bias") as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for fields in ({"prompt": [TOKENIZER_SIZE]}, {"stop_token_ids": [TOKENIZER_SIZE]}):
            answer = await client.post("/v1/completions", json=body(**fields))
            assert answer.status_code == 400
        assert len(await neighbour) == 60
        await system.settled()


@pytest.mark.parametrize("value", [-100, 100, 0.5])
async def test_every_id_of_the_tokenizer_may_be_biased(folder: Path, value: float) -> None:
    bias = {str(token): value for token in range(TOKENIZER_SIZE)}
    async with (
        local_system(local_config(), partial(backend, folder)) as system,
        system.apis(SmallCodec()) as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        answer = await client.post("/v1/completions", json=body(logit_bias=bias))
        assert answer.status_code == 200, answer.text
        last = {str(TOKENIZER_SIZE - 1): 100}
        steps = await system.steps(PROMPT, logit_bias={int(k): v for k, v in last.items()})
        assert {t for step in steps for t in step.token_ids} == {TOKENIZER_SIZE - 1}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 2.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.0, "repetition_penalty": 2.0, "logprobs": 20},
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(TOKENIZER_SIZE), -100.0)},
        {"temperature": 0.0, "min_tokens": 12, "stop_token_ids": tuple(range(16))},
    ],
)
async def test_padding_rows_are_never_sampled(folder: Path, sampling: dict[str, Any]) -> None:
    """Neither by the prefill worker, which draws the first token, nor by the decode worker."""
    async with local_system(local_config(), partial(backend, folder)) as system:
        for seed in range(3):
            steps = await system.steps(PROMPT, max_tokens=12, seed=seed, **sampling)
            tokens = [t for step in steps for t in step.token_ids]
            assert max(tokens) < TOKENIZER_SIZE
            tops = [t for s in steps for entry in s.logprobs for t, _ in entry.top]
            assert all(token < TOKENIZER_SIZE for token in tops)
