"""B003: what the prefill side refuses is one 4xx for the client; nothing is decoded from KV that
did not arrive whole, and the decode side's lease goes back.
"""

from __future__ import annotations

import httpx
import pytest
from fake_engine_model import expected
from gates import HoldAt
from local_system import fake_backend, local_config, local_system

from kvferry.engine.backend import Backend
from kvferry.engine.plan import StepPlan


def small_prefill(block_size: int) -> Backend:
    """The prefill worker (blocks of 4) has room for 32 tokens, the decode worker for 512."""
    return fake_backend(block_size, num_blocks=8 if block_size == 4 else 64)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_only_the_decode_side_could_hold(stream: bool) -> None:
    gate = HoldAt()
    config = local_config(decode={"block_size": 8})
    async with (
        local_system(config, small_prefill, decode_gate=gate) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=30, base_url=base_url) as client,
    ):
        for length in (33, 60, 120):
            body = {"prompt": [length] * length, "max_tokens": 5, "stream": stream}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "prompt"
            await system.settled()
        assert "decoding" not in gate.seen
        assert await system.generate([7] * 32) == expected([7] * 32, 8)


async def test_a_step_that_fails_when_part_of_its_layers_is_shipped() -> None:
    """The decode side has KV of the first layer; the attempt ends there, the next one is right."""
    failures = 2

    def fail(plan: StepPlan, layer: int) -> None:
        nonlocal failures
        if layer == 1 and failures:
            failures -= 1
            raise RuntimeError("out of memory, as far as this test goes")

    def backend(block_size: int) -> Backend:
        hooks = {"before_layer": fail} if block_size == 4 else {}
        return fake_backend(block_size, **hooks)

    config = local_config(decode={"block_size": 8}, transfer={"push": "layers", "slab": 1024})
    async with local_system(config, backend) as system:
        assert await system.generate([9] * 15, max_tokens=6) == expected([9] * 15, 6)
        assert not failures
        await system.settled()
