"""A decode worker that holds most of a prompt computes the rest itself: the pair (D, D)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine_model import expected
from gates import eventually
from local_system import LocalSystem, fake_backend, local_config, local_system

from kvferry.decode_worker.worker import DecodeWorker

PROMPT = list(range(10, 50))
LOCAL = {"local_tokens": 20}


async def turns_of_a_conversation(system: LocalSystem, count: int = 3) -> None:
    """Each turn's prompt is all that was said before, and five tokens more."""
    said = list(PROMPT)
    for turn in range(count):
        answer = await system.generate(said, max_tokens=14)
        assert answer == expected(said, 14)
        await system.settled()
        said += [*answer, *range(60 + turn, 65 + turn)]


def workers_of(system: LocalSystem) -> list[str]:
    return [timeline.prefill_worker for timeline in system.timelines]


async def test_later_turns_of_a_conversation_are_computed_where_its_answers_are() -> None:
    async with local_system(local_config(router=LOCAL)) as system:
        await turns_of_a_conversation(system)
        assert workers_of(system) == ["prefill-0", "decode-0", "decode-0"]
        for timeline, known in zip(system.timelines[1:], (40 + 14, 40 + 14 + 5 + 14), strict=True):
            # All but the last token of an answer, whose KV nobody needed, to full blocks of 4.
            assert timeline.cached_tokens_decode == (known - 1) // 4 * 4
            assert timeline.transfer_bytes == 0


@pytest.mark.parametrize(
    "sections",
    [
        {"router": {"local_tokens": 0}},
        {"router": {"local_tokens": 4}},
        {"router": LOCAL, "decode": {"prefix_cache": False}},
        {"router": LOCAL, "transfer": {"wire_dtype": "float32"}},
    ],
    ids=["off", "too much is missing", "nothing is held", "not what it would compute"],
)
async def test_who_does_not_hold_most_of_it_or_not_exactly_gets_it_sent(
    sections: dict[str, Any],
) -> None:
    async with local_system(local_config(**sections)) as system:
        await turns_of_a_conversation(system)
        assert set(workers_of(system)) == {"prefill-0"}


async def test_decodes_go_on_beside_a_local_prompt() -> None:
    """What a decode worker computes of prompts has the bound of its steps."""
    sizes: list[list[int]] = []

    def backend(size: int) -> Any:
        return fake_backend(
            size, before_execute=lambda plan: sizes.append(plan.query_lens.tolist())
        )

    config = local_config(decode={"max_batch_tokens": 3}, router=LOCAL)
    async with local_system(config, fake_backend, decode_backend=backend) as system:
        answer = await system.generate(PROMPT, max_tokens=14)
        await system.settled()
        other = asyncio.create_task(system.generate(PROMPT[:7], max_tokens=60))
        decode = next(w for w in system.workers.values() if isinstance(w, DecodeWorker))
        await eventually(lambda: decode.loop.load().running == 1)
        said = [*PROMPT, *answer, *range(60, 72)]
        assert await system.generate(said, max_tokens=2) == expected(said, 2)
        assert await other == expected(PROMPT[:7], 60)
        assert workers_of(system)[2] == "decode-0"
        await system.settled()
    assert max(map(sum, sizes)) == 3
    assert [1, 2] in sizes, "a decode and a chunk of the prompt in one step"
