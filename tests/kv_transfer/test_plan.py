"""The plan and the coverage are pure: properties over random layouts and ranges."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import TransferFailed
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.plan import Coverage, SlabMove, Span, check_compatible, plan_slabs

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    return KvLayout(
        num_layers=draw(st.integers(1, 48)),
        num_kv_heads=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([8, 64, 128])),
        block_size=draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from(["float64", "float32", "bfloat16"])),
    )


@settings(max_examples=100)
@given(layouts(), st.integers(0, 300), st.integers(1, 3000), st.sampled_from([1 << 20, 2 << 20]))
def test_slabs_partition_the_range_and_are_large(layout, begin, length, slab_bytes) -> None:
    tokens = Span(begin, begin + length)
    moves = plan_slabs(layout, layout, tokens, slab_bytes)
    seen = np.zeros((layout.num_layers, length), np.int32)
    for index, move in enumerate(moves):
        assert move.index == index
        assert move.heads == (0, layout.num_kv_heads)
        assert move.nbytes <= slab_bytes
        part = move.tokens.begin - begin, move.tokens.end - begin
        seen[move.layers.begin : move.layers.end, part[0] : part[1]] += 1
    assert (seen == 1).all()
    total = length * layout.token_bytes
    assert sum(move.nbytes for move in moves) == total
    assert min(move.nbytes for move in moves) >= min(total, 256 * 1024)


def test_block_size_plays_no_part() -> None:
    other = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=5, dtype="float32")
    tokens = Span(3, 500)
    assert plan_slabs(LAYOUT, other, tokens, 1 << 20) == plan_slabs(LAYOUT, LAYOUT, tokens, 1 << 20)


def test_an_empty_range_needs_no_slab() -> None:
    assert plan_slabs(LAYOUT, LAYOUT, Span(7, 7), 1 << 20) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_layers", 31), ("num_kv_heads", 4), ("head_dim", 32), ("dtype", "float16")],
)
def test_layouts_that_cannot_be_bridged_are_named(name: str, value: object) -> None:
    values = {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32"}
    other = KvLayout(block_size=16, **(values | {name: value}))
    with pytest.raises(TransferFailed, match=name):
        check_compatible(LAYOUT, other)
    with pytest.raises(TransferFailed, match=name):
        plan_slabs(LAYOUT, other, Span(0, 10), 1 << 20)


def test_a_slab_below_one_token_of_one_layer_is_refused() -> None:
    with pytest.raises(TransferFailed, match="one token of one layer"):
        plan_slabs(LAYOUT, LAYOUT, Span(0, 10), LAYOUT.layer_token_bytes - 1)


@settings(max_examples=25)
@given(st.integers(1, 800), st.randoms(use_true_random=False))
def test_coverage_is_complete_after_the_last_slab_in_any_order(
    length: int, rng: random.Random
) -> None:
    tokens = Span(5, 5 + length)
    moves = list(plan_slabs(LAYOUT, LAYOUT, tokens, 64 * 1024))
    rng.shuffle(moves)
    coverage = Coverage(LAYOUT, tokens)
    for move in moves:
        assert not coverage.complete
        assert coverage.fault(move) is None
        coverage.add(move)
        assert coverage.fault(move) is not None
    assert coverage.complete


@pytest.mark.parametrize(
    ("layers", "heads", "tokens", "match"),
    [
        (Span(0, 31), Span(0, 3), Span(5, 9), "outside"),
        (Span(0, 1), Span(0, 4), Span(5, 9), "outside"),
        (Span(0, 1), Span(0, 3), Span(4, 9), "outside"),
        (Span(0, 1), Span(0, 3), Span(5, 21), "outside"),
        (Span(1, 1), Span(0, 3), Span(5, 9), "outside"),
        (Span(0, 1), Span(0, 3), Span(9, 5), "outside"),
        (Span(0, 1), Span(0, 3), Span(5, 9), "size"),
        (Span(2, 4), Span(1, 2), Span(9, 12), "overlaps"),
    ],
)
def test_coverage_refuses_what_is_not_part_of_the_transfer(layers, heads, tokens, match) -> None:
    coverage = Coverage(LAYOUT, Span(5, 20))
    span = Span(3, 6), Span(0, 3), Span(5, 10)
    coverage.add(SlabMove(0, *span, 3 * 2 * 5 * 3 * 256))
    nbytes = 0 if match == "size" else 2 * 2 * 3 * 1 * 256
    fault = coverage.fault(SlabMove(1, layers, heads, tokens, nbytes))
    assert fault is not None
    assert match in fault
