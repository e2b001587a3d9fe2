"""Step plans for tests of runners, attention and samplers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvferry.engine.plan import SamplingRows, StepPlan

UNUSED = -(10**6)
"""Stands in block tables past a sequence's own blocks, where plans leave entries unspecified."""

DEFAULTS: dict[str, tuple[Any, type[np.generic]]] = {
    "temperature": (0.0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1.0, np.float32),
    "min_p": (0.0, np.float32),
    "seed": (0, np.uint64),
    "sample_index": (0, np.int32),
    "position": (0, np.int64),
}


def sampling_rows(count: int, **values: Any) -> SamplingRows:
    """``count`` rows; each value is one for all rows or a list of one per row."""
    rows = {
        name: np.broadcast_to(np.asarray(values.pop(name, default), dtype=dtype), count).copy()
        for name, (default, dtype) in DEFAULTS.items()
    }
    return SamplingRows(**rows, **values)


def subset(rows: SamplingRows, index: Any) -> SamplingRows:
    """Some rows, in this order, without edits and log-probabilities."""
    return SamplingRows(**{name: getattr(rows, name)[index] for name in DEFAULTS})


def step_plan(
    queries: Sequence[Sequence[int]],
    contexts: Sequence[int],
    tables: Sequence[Sequence[int]],
    sampled: Sequence[int] | None = None,
    **values: Any,
) -> StepPlan:
    """A plan that computes ``queries`` after ``contexts`` cached tokens; samples all by default."""
    query_lens = np.array([len(query) for query in queries], dtype=np.int32)
    context_lens = np.array(contexts, dtype=np.int32)
    block_tables = np.full((len(tables), max(map(len, tables))), UNUSED, dtype=np.int32)
    for row, table in zip(block_tables, tables, strict=True):
        row[: len(table)] = table
    rows = np.arange(len(queries)) if sampled is None else np.asarray(sampled, dtype=np.int64)
    values.setdefault("position", (context_lens + query_lens)[rows])
    return StepPlan(
        step=0,
        token_ids=np.concatenate([np.asarray(query, dtype=np.int64) for query in queries]),
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=block_tables,
        sampled=rows.astype(np.int32),
        sampling=sampling_rows(len(rows), **values),
    )


def scattered_tables(
    lengths: Sequence[int], block_size: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Block tables of sequences of these lengths over shuffled blocks; the number of blocks."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = rng.permutation(sum(counts)).tolist()
    bounds = np.cumsum([0, *counts])
    return [blocks[a:b] for a, b in pairwise(bounds)], len(blocks)
