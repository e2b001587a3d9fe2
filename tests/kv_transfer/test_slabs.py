"""Slabs: a range cut at once, and as it becomes ready."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.errors import TransferFailed
from kvferry.core.span import Span
from kvferry.kv_transfer.layout import KvLayout, Shard
from kvferry.kv_transfer.plan import (
    LEAST_SLAB_BYTES,
    Cutter,
    SlabMove,
    best_slab_bytes,
    cut,
    slab_nbytes,
)

LAYERS = 30
LAYOUT = KvLayout(num_layers=LAYERS, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32")


@st.composite
def regions(draw: st.DrawFn) -> tuple[Shard, Span, int]:
    layer, head, token = draw(st.integers(0, 9)), draw(st.integers(0, 3)), draw(st.integers(0, 300))
    layers = Span(layer, layer + draw(st.integers(1, 48)))
    heads = Span(head, head + draw(st.integers(1, 8)))
    head_bytes = draw(st.sampled_from([12, 32, 68, 128, 132, 256, 1024]))
    return Shard(layers, heads), Span(token, token + draw(st.integers(1, 3000))), head_bytes


class Canvas:
    """Counts how often each layer and token of a part is cut."""

    def __init__(self, part: Shard, tokens: Span, head_bytes: int) -> None:
        self.part, self.tokens, self.head_bytes = part, tokens, head_bytes
        self.seen = np.zeros((part.layers.length, tokens.length), np.int32)
        self.nbytes: list[int] = []

    def paint(self, move: SlabMove) -> None:
        assert move.index == len(self.nbytes)
        assert move.heads == self.part.heads
        assert move.nbytes == slab_nbytes(self.head_bytes, move.layers, move.heads, move.tokens)
        layers = move.layers.relative_to(self.part.layers.begin)
        self.seen[slice(*layers), slice(*move.tokens.relative_to(self.tokens.begin))] += 1
        self.nbytes.append(move.nbytes)

    def check(self, slab_bytes: int) -> None:
        assert (self.seen == 1).all()
        total = self.tokens.length * self.part.token_bytes(self.head_bytes)
        assert sum(self.nbytes) == total
        assert max(self.nbytes) <= slab_bytes
        assert min(self.nbytes) >= min(total, LEAST_SLAB_BYTES, slab_bytes // 3)


@settings(max_examples=100)
@given(regions(), st.sampled_from([20_000, 768 * 1024, 1 << 20, 2 << 20]))
def test_slabs_partition_the_range_and_are_large(region, slab_bytes) -> None:
    canvas = Canvas(*region)
    for move in cut(*region, slab_bytes):
        canvas.paint(move)
    canvas.check(slab_bytes)


def test_slabs_count_on_from_a_number() -> None:
    region = Shard(Span(0, 4), Span(0, 1)), Span(0, 9), 64
    assert [move.index for move in cut(*region, 1152, 7)] == [7, 8, 9, 10]


def test_an_empty_range_needs_no_slab() -> None:
    assert cut(LAYOUT.whole, Span(7, 7), 256, 1 << 20) == []
    assert cut(Shard(Span(3, 3), Span(0, 1)), Span(7, 9), 256, 1 << 20) == []


def test_a_slab_below_one_token_of_one_layer_is_refused() -> None:
    with pytest.raises(TransferFailed, match="one token of one layer has 1536 bytes"):
        cut(LAYOUT.whole, Span(0, 10), LAYOUT.head_bytes, 1535)
    assert len(cut(LAYOUT.whole, Span(0, 10), LAYOUT.head_bytes, 1536)) == 10 * LAYERS


def steps(part: Shard, tokens: Span, rng: random.Random) -> Iterator[tuple[int, int]]:
    """A prompt being computed, from its first token to beyond what is wanted of it: some layers of
    a chunk, then all, then the next chunk.
    """
    layers_total = part.layers.end + rng.randrange(3)
    end, chunk_end = tokens.end + rng.randrange(3), 0
    while chunk_end < end:
        chunk_end = min(end, chunk_end + rng.randint(1, rng.choice([16, 256, 2048])))
        stops = rng.sample(range(layers_total), rng.randrange(min(layers_total, 6) + 1))
        for layers_end in [*sorted(stops), layers_total]:
            yield layers_end, chunk_end


@settings(max_examples=150)
@given(
    regions(),
    st.sampled_from([20_000, 768 * 1024, 2 << 20]),
    st.sampled_from([0.0, 50_000.0, 1e6, float("inf")]),
    st.randoms(use_true_random=False),
)
def test_a_cutter_sends_what_is_ready_once_and_in_large_slabs(
    region, slab_bytes, least_bytes, rng
) -> None:
    part, tokens, _ = region
    canvas = Canvas(*region)
    cutter = Cutter(*region, slab_bytes, least_bytes)
    earlier = 0
    chunk_end = 0
    for layers_end, tokens_end in steps(part, tokens, rng):
        if tokens_end > chunk_end:
            earlier, chunk_end = chunk_end, tokens_end
        assert not cutter.complete
        moves = cutter.advance(layers_end, tokens_end)
        for move in moves:
            assert move.tokens.end <= earlier or (
                move.tokens.end <= tokens_end and move.layers.end <= layers_end
            )
            canvas.paint(move)
        if least_bytes == float("inf") and not cutter.complete:
            assert moves == []
        assert cutter.num_cut == len(canvas.nbytes)
        if cutter.complete:
            break
    assert cutter.complete
    assert cutter.nbytes == sum(canvas.nbytes)
    canvas.check(slab_bytes)


def test_a_cutter_sends_layers_while_later_ones_are_computed() -> None:
    cutter = Cutter(LAYOUT.whole, Span(0, 1024), LAYOUT.head_bytes, 2 << 20)
    cut_after = [len(cutter.advance(layer, 1024)) for layer in range(1, LAYERS + 1)]
    assert cut_after == [1] * LAYERS


def test_a_cutter_waits_for_the_least_that_is_worth_a_send() -> None:
    layer_nbytes = 1024 * LAYOUT.layer_token_bytes
    cutter = Cutter(LAYOUT.whole, Span(0, 1024), LAYOUT.head_bytes, 2 << 20, 10 * layer_nbytes)
    cut_after = [bool(cutter.advance(layer, 1024)) for layer in range(1, LAYERS + 1)]
    assert [layer for layer, any_ in enumerate(cut_after, 1) if any_] == [10, 20, 30]


def test_a_cutter_tells_again_what_it_told_without_sending_twice() -> None:
    cutter = Cutter(LAYOUT.whole, Span(0, 2048), LAYOUT.head_bytes, 2 << 20)
    assert len(cutter.advance(7, 1024)) == 7
    assert cutter.advance(7, 1024) == []
    assert cutter.advance(3, 1024) == []


def test_a_cutter_of_nothing_is_complete() -> None:
    cutter = Cutter(LAYOUT.whole, Span(5, 5), LAYOUT.head_bytes, 2 << 20)
    assert cutter.complete
    assert cutter.advance(LAYERS, 5) == []


@pytest.mark.parametrize(
    ("nbytes", "slab_bytes", "expected"),
    [(1 << 18, 2 << 20, 3 << 18), (1 << 20, 2 << 20, 1 << 20), (1 << 30, 2 << 20, 2 << 20)],
)
def test_slabs_grow_with_the_root_of_the_transfer(nbytes, slab_bytes, expected):
    """Each costs something, and the receiver is one behind."""
    assert best_slab_bytes(nbytes, slab_bytes) == expected
