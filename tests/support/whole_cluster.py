"""Configurations and clients of whole systems on Ray, for a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvferry.client.client import KvferryClient
from kvferry.core.config import Config, parse_config
from kvferry.core.sampling import SamplingParams
from kvferry.proto import kvferry_pb2

SAMPLING = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 20))


def config_for(folder: Path, **sections: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "model": {"path": str(folder)},
        "prefill": {"workers": 1, "block_size": 4, "kv_memory": "2MiB"},
        "decode": {"workers": 1, "block_size": 8, "kv_memory": "2MiB"},
        "router": {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"},
        "cluster": {"start_timeout_s": 120, "beat_s": 0.2, "silence_s": 3},
    }
    for name, values in sections.items():
        base.setdefault(name, {}).update(values)
    return parse_config(base)


async def tokens(client: KvferryClient) -> list[int]:
    found: list[int] = []
    async for response in client.generate(PROMPT, SAMPLING):
        found += response.token_ids
    return found


async def ready(client: KvferryClient) -> kvferry_pb2.StatusResponse:
    async with asyncio.timeout(60):
        while not (status := await client.status()).ready:
            await asyncio.sleep(0.05)
    return status


async def blocks_are_back(client: KvferryClient) -> None:
    async with asyncio.timeout(20):
        while True:
            status = await client.status()
            if not any(w.blocks.in_use + w.blocks.reserved for w in status.workers):
                return
            await asyncio.sleep(0.05)
