"""The work list of flash_attention, as numbers."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.plan import keys_seen

LENGTHS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 3000)), max_size=12)


def costs_of(plan: PrefillPlan, lengths: list[tuple[int, int]], window: int | None) -> list[int]:
    """Keys that each tile visits, in the order of the list."""
    costs = []
    for seq, row in plan.tiles.tolist():
        queries, context = lengths[seq]
        last = context + min(queries, row + plan.rows)
        first = context + row
        costs.append(last - (0 if window is None else max(0, first - window + 1)))
    return costs


def makespan(costs: list[int], num_sms: int) -> int:
    """When the last SM is done if each takes the next tile of the list when it is free."""
    ends = [0] * num_sms
    for cost in costs:
        heapq.heappush(ends, heapq.heappop(ends) + cost)
    return max(ends)


@given(
    lengths=LENGTHS,
    rows=st.sampled_from([1, 16, 128]),
    window=st.none() | st.integers(1, 500),
)
def test_every_row_is_in_one_tile_and_the_heaviest_come_first(
    lengths: list[tuple[int, int]], rows: int, window: int | None
) -> None:
    plan = PrefillPlan.of(
        [queries for queries, _ in lengths],
        [context for _, context in lengths],
        window=window,
        rows=rows,
    )
    assert plan.tiles.dtype is torch.int32
    covered = [
        (seq, row + i)
        for seq, row in plan.tiles.tolist()
        for i in range(min(rows, lengths[seq][0] - row))
    ]
    assert sorted(covered) == [
        (seq, row) for seq, (queries, _) in enumerate(lengths) for row in range(queries)
    ]
    costs = costs_of(plan, lengths, window)
    assert costs == sorted(costs, reverse=True)


@given(lengths=LENGTHS, num_sms=st.integers(1, 40))
def test_long_and_short_sequences_balance(lengths: list[tuple[int, int]], num_sms: int) -> None:
    """No SM ends later than the heaviest tile, or than the mean load and one tile of those that
    did not start at once: whatever ends last began when no SM was free, thus before the mean.
    """
    queries, contexts = zip(*lengths, strict=True) if lengths else ((), ())
    costs = costs_of(PrefillPlan.of(queries, contexts, rows=64), lengths, None)
    heaviest = costs[0] if costs else 0
    waiting = costs[num_sms] if len(costs) > num_sms else 0
    assert makespan(costs, num_sms) <= max(heaviest, sum(costs) / num_sms + waiting)


def test_one_long_prompt_among_short_ones_starts_first() -> None:
    """Last in the batch it would start when the others are done."""
    lengths = [(128, 0)] * 30000 + [(4096, 28672)]
    queries, contexts = zip(*lengths, strict=True)
    costs = costs_of(PrefillPlan.of(queries, contexts), lengths, None)
    least = max(sum(costs) / 132, costs[0])
    assert makespan(costs, 132) <= 1.01 * least
    assert makespan(costs[::-1], 132) > 1.5 * least


def test_keys_seen() -> None:
    first, rows = np.array([0, 10, 100]), np.array([1, 16, 4])
    assert keys_seen(first, rows, None).tolist() == [1, 26, 104]
    assert keys_seen(first, rows, 8).tolist() == [1, 23, 11]


@pytest.mark.parametrize(
    ("queries", "contexts", "options", "named"),
    [
        ([1, 2], [0], {}, "context_lens"),
        ([-1], [0], {}, "query_lens"),
        ([1], [-1], {}, "context_lens"),
        ([1], [0], {"rows": 0}, "rows"),
        ([1], [0], {"window": 0}, "window"),
    ],
)
def test_bad_lengths_are_named(
    queries: list[int], contexts: list[int], options: dict[str, int], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        PrefillPlan.of(queries, contexts, **options)
