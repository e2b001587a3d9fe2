"""B019: no stop rule fires before min_tokens, whichever worker draws the token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine_model import EOS, expected
from local_system import fake_backend, local_config, local_system

from kvferry.core.request import FinishReason

PROMPT = list(range(10, 31))
OTHER_EOS = 95
POOLS: dict[str, dict[str, Any]] = {
    "PD": {},
    "colocated": {"prefill": {"workers": 0}, "decode": {"role": "both"}},
}


@pytest.mark.parametrize("rule", ["end token", "another end token", "stop token"])
@pytest.mark.parametrize("min_tokens", [1, 2, 7])
@pytest.mark.parametrize("pools", POOLS)
async def test_tokens(pools: str, min_tokens: int, rule: str) -> None:
    wanted = {"end token": EOS, "another end token": OTHER_EOS, "stop token": 60}[rule]
    sampling: dict[str, Any] = {"logit_bias": {wanted: 100.0}, "max_tokens": 20}
    if rule == "stop token":
        sampling["stop_token_ids"] = (60,)
    async with local_system(
        local_config(**POOLS[pools]), lambda size: fake_backend(size, eos=(EOS, OTHER_EOS))
    ) as system:
        steps = await system.steps(PROMPT, min_tokens=min_tokens, **sampling)
        tokens = [token for step in steps for token in step.token_ids]
        assert len(tokens) == min_tokens + 1
        assert tokens[-1] == wanted
        assert wanted not in tokens[:-1]
        assert steps[-1].finish_reason is FinishReason.STOP
        await system.settled()


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
async def test_a_stop_string_in_what_came_before(min_tokens: int) -> None:
    text = "".join(map(chr, expected(PROMPT, 12)))
    stop = text[0]
    begin = text.find(stop, min_tokens)
    body = {
        "prompt": PROMPT,
        "stop": [stop],
        "min_tokens": min_tokens,
        "max_tokens": 12,
        "temperature": 0,
    }
    async with (
        local_system(local_config()) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] == (text if begin < 0 else text[:begin])
        await system.settled()
