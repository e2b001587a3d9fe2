"""B014: one formula says what can ever fit; what waits and is given up blocks nobody after it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine_model import expected
from gates import HoldAt, eventually
from local_system import fake_backend, local_config, local_system

from kvferry.decode_worker.admission import Ledger
from kvferry.engine.backend import Backend
from kvferry.prefill_worker.admission import PromptAdmission

PAGE = 4
CAPACITY = 16 * PAGE
LENGTHS = range(CAPACITY - 2 * PAGE, CAPACITY + 2)
BOTH: dict[str, dict[str, Any]] = {"prefill": {"workers": 0}, "decode": {"role": "both"}}


def small(block_size: int) -> Backend:
    return fake_backend(block_size, num_blocks=CAPACITY // block_size)


def prompt_of(length: int) -> list[int]:
    return [length, *[7] * (length - 1)]


@pytest.mark.parametrize("block_size", [1, 3, PAGE, 16])
def test_what_is_not_refused_is_admitted_by_an_empty_worker(block_size: int) -> None:
    for num_blocks in (1, 2, 5):
        ledger = Ledger(
            num_blocks=num_blocks, block_size=block_size, max_model_len=60, growth_tokens=32
        )
        prompts = PromptAdmission(
            num_blocks=num_blocks, block_size=block_size, max_model_len=60, max_batch_tokens=16
        )
        for length in range(1, 64):
            needed = -(-length // block_size)
            growth = num_blocks * block_size
            if ledger.never_fits(length) is None:
                assert ledger.admits(num_blocks, needed, None, growth)
                assert num_blocks * block_size > length, "one more token must fit as well"
            else:
                assert length >= 60 or num_blocks * block_size < length + 1
            fits = prompts.never_fits(length) is None
            assert fits == (length < 60 and needed <= num_blocks)


def test_growth_never_asks_for_more_than_the_end_of_a_sequence() -> None:
    ledger = Ledger(num_blocks=16, block_size=PAGE, max_model_len=CAPACITY, growth_tokens=32)
    lengths, most = np.array([CAPACITY - 1, 10]), np.array([CAPACITY, 11])
    for guaranteed in (False, True):
        assert ledger.growth(lengths, most, np.array([guaranteed] * 2)) == 0


def test_what_was_given_back_once_comes_in_with_room_to_its_end() -> None:
    ledger = Ledger(num_blocks=16, block_size=PAGE, max_model_len=CAPACITY, growth_tokens=4)
    lengths, most = np.array([9, 9]), np.array([50, 50])
    assert ledger.growth(lengths, most, np.array([False, False])) == 2
    assert ledger.growth(lengths, most, np.array([False, True])) == 1 + 10


@pytest.mark.parametrize("pools", [{}, {"decode": {"block_size": 8}}, BOTH])
async def test_every_length_is_answered_or_refused_at_once(pools: dict[str, Any]) -> None:
    async with (
        local_system(local_config(**pools), small) as system,
        system.apis() as (_, base_url),
        httpx.AsyncClient(timeout=5, base_url=base_url) as client,
    ):
        for length in LENGTHS:
            body = {"prompt": prompt_of(length), "max_tokens": 1, "temperature": 0}
            response = await client.post("/v1/completions", json=body)
            # A colocated worker asks for the room that one more token would need.
            most = CAPACITY - 1 if pools is BOTH else CAPACITY
            if length <= most:
                assert response.status_code == 200, (length, response.text)
            else:
                assert response.status_code == 400, (length, response.text)
                assert response.json()["error"]["param"] == "prompt"
        last = {"prompt": [1], "max_tokens": 1, "temperature": 0}
        assert (await client.post("/v1/completions", json=last)).status_code == 200
        await system.settled()


@pytest.mark.parametrize("pools", [{}, BOTH])
async def test_those_that_wait_can_be_cancelled_and_the_last_request_runs(
    pools: dict[str, Any],
) -> None:
    gate = HoldAt("decoding")
    async with local_system(local_config(**pools), small, decode_gate=gate) as system:
        decode = next(w for name, w in system.workers.items() if not name.startswith("prefill"))
        first = asyncio.create_task(system.generate(prompt_of(CAPACITY - 2), max_tokens=2))
        await gate.reached()
        waiting = [
            asyncio.create_task(system.generate(prompt_of(length), max_tokens=2))
            for length in range(CAPACITY - 2 * PAGE, CAPACITY - 1)
        ]
        await eventually(lambda: system.router.status().queued and decode.loop.load().waiting)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: not decode.loop.load().waiting)
        last = asyncio.create_task(system.generate([1], max_tokens=2))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        gate.open()
        async with asyncio.timeout(10):
            assert await last == expected([1], 2)
        await system.settled()
