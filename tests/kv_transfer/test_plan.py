"""The plan is pure: properties over all layouts, ranges, cuts and orders of arrival."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import TransferFailed
from kvferry.core.span import Span
from kvferry.kv_transfer.layout import KvLayout, Shard
from kvferry.kv_transfer.plan import (
    Coverage,
    SlabMove,
    check_compatible,
    cut,
    parts,
    slab_nbytes,
    wire_dtype,
)

RANKS = [1, 2, 3, 4, 8]
LAYERS, HEADS = 30, 3
LAYOUT = KvLayout(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=64, block_size=16, dtype="float32"
)


def split(num_layers: int, num_kv_heads: int, tp: int, pp: int = 1) -> KvLayout:
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        block_size=16,
        dtype="float32",
        tp=tp,
        pp=pp,
    )


def assert_parts_cover_each_shard(source: KvLayout, target: KvLayout) -> None:
    for target_rank in range(target.num_ranks):
        sent = np.zeros((source.num_layers, source.num_kv_heads), np.int32)
        for rank in range(source.num_ranks):
            held = source.shard(rank)
            for part in parts(source, rank, target, target_rank):
                assert part.layers.within(held.layers)
                assert part.heads.within(held.heads)
                sent[slice(*part.layers), slice(*part.heads)] += 1
        wanted = np.zeros_like(sent)
        shard = target.shard(target_rank)
        wanted[slice(*shard.layers), slice(*shard.heads)] = 1
        assert (sent == wanted).all()


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(RANKS, RANKS)))
def test_every_element_of_a_rank_is_sent_once(prefill: int, decode: int) -> None:
    for heads in (1, 2, 3, 4, 5, 8, 12):
        assert_parts_cover_each_shard(split(2, heads, prefill), split(2, heads, decode))


@settings(max_examples=60)
@given(
    st.integers(1, 13),
    st.integers(1, 9),
    *(st.sampled_from(RANKS) for _ in range(2)),
    *(st.integers(1, 5) for _ in range(2)),
)
def test_and_so_with_stages(layers, heads, prefill, decode, source_pp, target_pp) -> None:
    source = split(layers, heads, prefill, min(source_pp, layers))
    assert_parts_cover_each_shard(source, split(layers, heads, decode, min(target_pp, layers)))


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(RANKS, RANKS)))
def test_ranks_that_hold_the_same_head_share_its_receivers(prefill: int, decode: int) -> None:
    source, target = split(1, 2, prefill), split(1, 2, decode)
    for head in range(2):
        holders = [r for r in range(prefill) if Span(head, head + 1).within(source.shard(r).heads)]
        served = {
            rank: sum(
                Span(head, head + 1).within(part.heads)
                for target_rank in range(decode)
                for part in parts(source, rank, target, target_rank)
            )
            for rank in holders
        }
        assert max(served.values()) - min(served.values()) <= 1


def test_a_part_is_as_few_ranges_as_can_be() -> None:
    assert parts(split(4, 8, 2), 0, split(4, 8, 4), 1) == (Shard(Span(0, 4), Span(2, 4)),)
    assert parts(split(4, 8, 2), 0, split(4, 8, 4), 2) == ()
    assert parts(split(4, 8, 1, 2), 1, split(4, 8, 1, 1), 0) == (Shard(Span(2, 4), Span(0, 8)),)
    assert parts(split(4, 8, 1, 2), 0, split(4, 8, 1, 2), 1) == ()


@pytest.mark.parametrize(
    ("name", "value"), [("num_layers", 31), ("num_kv_heads", 4), ("head_dim", 32)]
)
def test_layouts_that_cannot_be_bridged_are_named(name: str, value: object) -> None:
    values = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": 64, "dtype": "float32"}
    other = KvLayout(block_size=16, **(values | {name: value}))
    with pytest.raises(TransferFailed, match=name):
        check_compatible(LAYOUT, other)
    with pytest.raises(TransferFailed, match=name):
        parts(LAYOUT, 0, other, 0)


def typed(dtype: str, head_dim: int = 64) -> KvLayout:
    return KvLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=1, dtype=dtype)


@pytest.mark.parametrize(
    ("source", "target", "forced", "wire"),
    [
        ("float32", "float32", None, "float32"),
        ("float64", "float32", None, "float32"),
        ("float32", "float64", None, "float32"),
        ("bfloat16", "float32", None, "bfloat16"),
        ("bfloat16", "float16", None, "bfloat16"),
        ("float16", "bfloat16", None, "float16"),
        ("float32", "int8", None, "int8"),
        ("bfloat16", "float8_e4m3fn", None, "float8_e4m3fn"),
        ("int8", "int8", None, "int8"),
        ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
        ("float32", "float32", "int8", "int8"),
        ("float32", "int8", "float32", "float32"),
    ],
)
def test_the_narrower_type_travels_unless_one_is_forced(source, target, forced, wire) -> None:
    assert wire_dtype(typed(source), typed(target), forced) == wire


@pytest.mark.parametrize(
    ("source", "target", "forced", "match"),
    [
        ("int8", "float32", None, "int8 is not converted to int8, float32"),
        ("int8", "float8_e4m3fn", None, "int8 is not converted"),
        ("int8", "int8", "float32", "int8 is not converted to float32"),
        ("float32", "float32", "complex64", "complex64"),
    ],
)
def test_conversions_that_are_not_made(source, target, forced, match) -> None:
    with pytest.raises(TransferFailed, match=match):
        wire_dtype(typed(source), typed(target), forced)


def test_heads_whose_scales_would_not_lie_on_words_are_not_quantised() -> None:
    assert wire_dtype(typed("float32", 6), typed("float32", 6)) == "float32"
    with pytest.raises(TransferFailed, match="heads of 6"):
        wire_dtype(typed("float32", 6), typed("float32", 6), "int8")


def coverage_of(tokens: Span, shard: Shard = LAYOUT.whole) -> Coverage:
    return Coverage(shard, tokens, LAYOUT.head_bytes)


@settings(max_examples=40)
@given(
    st.integers(1, 800),
    st.sampled_from(RANKS),
    st.sampled_from(RANKS),
    st.randoms(use_true_random=False),
)
def test_coverage_is_complete_after_the_last_slab_in_any_order(
    length: int, prefill: int, decode: int, rng: random.Random
) -> None:
    tokens = Span(5, 5 + length)
    source, target = split(6, 4, prefill, 2), split(6, 4, decode)
    rank = rng.randrange(decode)
    moves = [
        (sender, move)
        for sender in range(source.num_ranks)
        for part in parts(source, sender, target, rank)
        for move in cut(part, tokens, source.head_bytes, rng.choice([400, 6000, 64_000]))
    ]
    rng.shuffle(moves)
    coverage = Coverage(target.shard(rank), tokens, source.head_bytes)
    for sender, move in moves:
        assert not coverage.complete
        assert coverage.fault(move) is None
        coverage.add(sender, move)
        assert coverage.fault(move) == "range overlaps another slab"
    assert coverage.complete
    assert coverage.nbytes == length * target.shard(rank).token_bytes(source.head_bytes)


def random_span(rng: random.Random, begin: int, end: int) -> Span:
    first, last = sorted(rng.sample(range(begin, end + 1), 2))
    return Span(first, last)


def test_nothing_fits_beside_all_of_it() -> None:
    coverage = coverage_of(Span(0, 8))
    whole = Span(0, LAYOUT.num_layers), Span(0, LAYOUT.num_kv_heads)
    for index, tokens in enumerate((Span(0, 3), Span(3, 8))):
        move = SlabMove(index, *whole, tokens, slab_nbytes(LAYOUT.head_bytes, *whole, tokens))
        assert coverage.fault(move) is None
        coverage.add(0, move)
    assert coverage.complete
    assert coverage.fault(move) == "range overlaps another slab"


@pytest.mark.parametrize("case", range(50))
def test_coverage_finds_every_overlap(seeded: int, case: int) -> None:
    rng = random.Random(seeded + case)
    shard, tokens = Shard(Span(2, 6), Span(1, 5)), Span(3, 15)
    coverage = coverage_of(tokens, shard)
    seen = np.zeros((4, 4, 12), bool)
    for index in range(60):
        spans = random_span(rng, 2, 6), random_span(rng, 1, 5), random_span(rng, 3, 15)
        move = SlabMove(index, *spans, slab_nbytes(LAYOUT.head_bytes, *spans))
        place = tuple(
            slice(*span.relative_to(first)) for span, first in zip(spans, (2, 1, 3), strict=True)
        )
        assert (coverage.fault(move) is not None) == seen[place].any()
        if not seen[place].any():
            seen[place] = True
            coverage.add(0, move)
    assert coverage.complete == seen.all()


def test_coverage_of_a_long_prompt_costs_no_more_per_slab() -> None:
    """65,536 slabs; against each other they would be 2,147,450,880 pairs."""
    tokens = Span(0, 32_768)
    layout = KvLayout(num_layers=64, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    coverage = Coverage(layout.whole, tokens, layout.head_bytes)
    moves = cut(layout.whole, tokens, layout.head_bytes, 32 * layout.layer_token_bytes)
    assert len(moves) == 65_536
    random.Random(3).shuffle(moves)
    for move in moves:
        assert coverage.fault(move) is None
        coverage.add(0, move)
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
    coverage = coverage_of(Span(5, 20))
    span = Span(3, 6), Span(0, 3), Span(5, 10)
    coverage.add(0, SlabMove(0, *span, 3 * 2 * 5 * 3 * 256))
    nbytes = 0 if match == "size" else 2 * 2 * 3 * 1 * 256
    fault = coverage.fault(SlabMove(1, layers, heads, tokens, nbytes))
    assert fault is not None
    assert match in fault
