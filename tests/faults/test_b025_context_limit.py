"""B025: an answer that runs to the context limit ends there, with exactly as many tokens."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine_model import expected
from local_system import fake_backend, local_config, local_system

LIMIT = 64
POOLS: dict[str, dict[str, Any]] = {
    "PD": {},
    "PD, blocks that do not divide the limit": {
        "prefill": {"block_size": 5},
        "decode": {"block_size": 7},
    },
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both"}},
}


@pytest.mark.parametrize("pools", POOLS)
async def test_length_at_exactly_the_limit(pools: str) -> None:
    async with (
        local_system(
            local_config(**POOLS[pools]), lambda size: fake_backend(size, max_model_len=LIMIT)
        ) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        for length in range(LIMIT - 6, LIMIT):
            prompt = [length, *range(length - 1)]
            body = {"prompt": prompt, "temperature": 0}
            answer = (await client.post("/v1/completions", json=body)).json()
            (choice,) = answer["choices"]
            assert choice["text"] == "".join(map(chr, expected(prompt, LIMIT - length)))
            assert choice["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == LIMIT
            too_many = body | {"max_tokens": LIMIT - length + 1}
            refused = await client.post("/v1/completions", json=too_many)
            assert refused.json()["error"]["param"] == "max_tokens"
        full = await client.post("/v1/completions", json={"prompt": [1] * LIMIT})
        assert full.status_code == 400
        await system.settled()
