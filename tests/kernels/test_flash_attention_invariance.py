"""No row of flash_attention depends on its neighbours, its chunk or its plan, to the bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from paged_prompts import Inputs, Prompts
from rows_apart import rows_apart

from kvferry.kernels.flash_attention.device_plan import PrefillPlan

BATCH = Prompts(
    lengths=((5, 0), (37, 9), (18, 30)),
    dtype=torch.bfloat16,
    cache_dtype=torch.bfloat16,
    block_size=16,
)
VARIANTS = [
    BATCH,
    replace(BATCH, dtype=torch.float32, cache_dtype=torch.float32, window=20),
    replace(BATCH, cache_dtype=torch.float8_e4m3fn, block_size=8, softcap=3.0),
]


def part_of(prompts: Prompts, inputs: Inputs, seq: int, first: int, last: int) -> Inputs:
    """The queries [first, last) of one sequence as a step of their own, with what comes before them
    as cached context.
    """
    begin, context = int(inputs.starts[seq]), int(inputs.contexts[seq])
    return replace(
        inputs,
        q=inputs.q[begin + first : begin + last],
        tables=inputs.tables[seq : seq + 1],
        starts=torch.tensor([0, last - first], dtype=torch.int32),
        contexts=torch.tensor([context + first], dtype=torch.int32),
        plan=PrefillPlan.of(
            [last - first], [context + first], window=prompts.window, rows=prompts.config.rows
        ),
    )


@pytest.mark.parametrize("prompts", VARIANTS, ids=lambda prompts: str(prompts.cache_dtype))
def test_alone_and_in_other_chunks(prompts: Prompts, seeded: int) -> None:
    prompts = replace(prompts, seed=seeded)
    inputs = prompts.inputs()
    with rows_apart():
        together = prompts.attend(inputs)[5:42]
        for cuts in ((0, 37), (0, 3, 19, 36, 37)):
            parts = [
                prompts.attend(part_of(prompts, inputs, 1, first, last))
                for first, last in pairwise(cuts)
            ]
            assert torch.equal(torch.cat(parts), together), cuts


def test_the_order_of_the_plan_changes_nothing(seeded: int) -> None:
    prompts = replace(BATCH, seed=seeded)
    inputs = prompts.inputs()
    tiles = inputs.plan.tiles.flip(0)
    backwards = replace(inputs, plan=replace(inputs.plan, tiles=tiles))
    assert torch.equal(prompts.attend(backwards), prompts.attend(inputs))


def test_tokens_after_the_chunk_change_nothing(seeded: int) -> None:
    """Chunks of a prompt that another step has already extended."""
    prompts = replace(BATCH, seed=seeded)
    inputs = prompts.inputs()
    alone = prompts.attend(part_of(prompts, inputs, 2, 0, 7))
    blocks = inputs.tables[2, 48 // prompts.block_size - 1 :]
    blocks = blocks[blocks < inputs.kv.k.shape[0]].long()
    position = 37 % prompts.block_size
    inputs.kv.k[blocks[0], position:] = 1e4
    inputs.kv.v[blocks, position:] = torch.nan
    assert torch.equal(prompts.attend(part_of(prompts, inputs, 2, 0, 7)), alone)
