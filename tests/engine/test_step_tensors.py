"""Index arithmetic of a step against loops over its tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from step_plans import scattered_tables, step_plan

from kvferry.engine.step_tensors import StepTensors, token_slots

torch.set_num_threads(1)

QUERY_LENS = [1, 7, 1, 16, 3, 33]
CONTEXT_LENS = [0, 0, 40, 16, 15, 1]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_tokens_positions_and_slots(block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    lengths = np.add(QUERY_LENS, CONTEXT_LENS).tolist()
    tables, _ = scattered_tables(lengths, block_size, rng)
    queries = [rng.integers(0, 1000, length).tolist() for length in QUERY_LENS]
    plan = step_plan(queries, CONTEXT_LENS, tables, sampled=[1, 2, 5])
    tensors = StepTensors.build(plan, block_size, "cpu")
    positions, slots, last = [], [], []
    for table, query, context in zip(tables, QUERY_LENS, CONTEXT_LENS, strict=True):
        own = range(context, context + query)
        positions += own
        slots += [table[t // block_size] * block_size + t % block_size for t in own]
        last.append(len(positions) - 1)
    assert tensors.token_ids.tolist() == [token for query in queries for token in query]
    assert tensors.positions.tolist() == positions
    assert tensors.slots.tolist() == slots
    assert tensors.sampled_tokens.tolist() == [last[1], last[2], last[5]]
    assert tensors.query_starts.tolist() == np.cumsum([0, *QUERY_LENS]).tolist()
    for tensor in (tensors.token_ids, tensors.positions, tensors.slots, tensors.sampled_tokens):
        assert tensor.dtype == torch.int64


def test_short_sequences_stand_first() -> None:
    lengths, contexts = [20, 1, 17, 16, 30], [3, 40, 0, 5, 9]
    rng = np.random.default_rng(3)
    tables, _ = scattered_tables(np.add(lengths, contexts).tolist(), 4, rng)
    queries = [rng.integers(0, 1000, length).tolist() for length in lengths]
    mixed = StepTensors.build(step_plan(queries, contexts, tables, sampled=[0, 1, 4]), 4, "cpu")
    order = [1, 3, 0, 2, 4]
    sorted_plan = step_plan(
        *([values[i] for i in order] for values in (queries, contexts, tables)), sampled=[0, 2, 4]
    )
    expected = StepTensors.build(sorted_plan, 4, "cpu")
    assert mixed.num_short == expected.num_short == 2
    for name in ("token_ids", "positions", "slots"):
        assert getattr(mixed, name).tolist() == getattr(expected, name).tolist()
    assert mixed.query_starts.tolist() == [0, 1, 17, 37, 54, 84]
    assert mixed.context_lens.tolist() == [40, 5, 3, 0, 9]
    # Rows come in the plan's order: sequences 0, 1 and 4.
    assert mixed.sampled_tokens.tolist() == [36, 0, 83]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_padding_repeats_a_sequences_own_last_slot(block_size: int) -> None:
    lengths = [1, 17, 16, 4, 40]
    tables, _ = scattered_tables(lengths, block_size, np.random.default_rng(0))
    plan = step_plan([[0]] * 5, [0] * 5, tables)
    slots = token_slots(plan.block_tables, np.array(lengths), block_size)
    assert slots.shape == (5, 40)
    for row, table, length in zip(slots.tolist(), tables, lengths, strict=True):
        own = [table[t // block_size] * block_size + t % block_size for t in range(length)]
        assert row == own + [own[-1]] * (40 - length)
