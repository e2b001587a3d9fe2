"""Host memory of a rank: every pair of splits and of block sizes against slicing the whole model's
KV, and what does not fit is refused.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from paged_caches import converted, copied, picked, poison, put, same_bytes, slots_of, values

from kvferry.core.span import Span
from kvferry.kernels.kv_layer import QUANTISED_TYPES
from kvferry.kernels.kv_pack.slab import KvSlots
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout, Shard, head_nbytes
from kvferry.kv_transfer.memory import Form, PagedKvMemory
from kvferry.kv_transfer.plan import SlabMove, cut, parts

torch.set_num_threads(1)

RANKS = [1, 2, 3, 4, 8]
BLOCKS = [8, 16, 24, 32, 128, 256]
PAIRS = list(itertools.product(RANKS, RANKS))
BLOCK_PAIRS = list(itertools.product(BLOCKS, BLOCKS))
TYPES = [
    ("float32", "float32", "float32"),
    ("float64", "float32", "float32"),
    ("float32", "float32", "float64"),
    ("bfloat16", "bfloat16", "float16"),
    ("float32", "int8", "bfloat16"),
    ("bfloat16", "float8_e4m3fn", "float32"),
    ("float16", "int8", "int8"),
    ("float8_e4m3fn", "float8_e4m3fn", "float8_e4m3fn"),
    ("int8", "int8", "int8"),
]


class Rank:
    """One rank's cache: a shard of the model, in shuffled blocks."""

    def __init__(self, layout: KvLayout, rank: int, num_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.shard = layout.shard(rank)
        num_blocks = -(-num_tokens // layout.block_size) + 1
        shape = (self.shard.layers.length, 2, num_blocks * layout.block_size)
        shape += (self.shard.heads.length, layout.head_dim)
        self.kv = poison(shape, getattr(torch, layout.dtype), seed)
        self.generations = rng.integers(0, 2**32, num_blocks, dtype=np.uint32)
        ids = rng.permutation(num_blocks)[: num_blocks - 1].astype(np.int32)
        self.blocks = BlockTable(block_ids=ids, generations=self.generations[ids].copy())
        self.slots = slots_of(ids, 0, num_tokens, layout.block_size)
        self.memory = PagedKvMemory(
            self.kv.elements, layout, self.generations, rank=rank, scales=self.kv.scales
        )

    def of(self, whole: KvSlots, tokens: Span) -> KvSlots:
        """This rank's part of the whole model's KV, [L, 2, T, H, D]."""
        return picked(whole, list(range(*tokens)), self.shard.layers, self.shard.heads)

    def write(self, kv: KvSlots, part: KvSlots, tokens: Span) -> None:
        everything = (0, self.shard.layers.length), (0, self.shard.heads.length)
        put(kv, self.slots[slice(*tokens)], *everything, part)


@pytest.mark.parametrize(
    ("number", "prefill", "decode"), [(i, *pair) for i, pair in enumerate(PAIRS)]
)
@pytest.mark.parametrize("heads", [2, 3, 7])
def test_every_pair_of_splits(number: int, prefill: int, decode: int, heads: int) -> None:
    """Block sizes, types and stages differ from pair to pair, so that all of them are met."""
    number = number * 3 + heads % 3
    source_block, target_block = BLOCK_PAIRS[number % len(BLOCK_PAIRS)]
    source_type, wire, target_type = TYPES[number % len(TYPES)]
    rng, tokens = random.Random(number), Span(number % 29, 70 + number)
    model = {"num_layers": 3, "num_kv_heads": heads, "head_dim": 8}
    source = KvLayout(
        **model, block_size=source_block, dtype=source_type, tp=prefill, pp=1 + number % 2
    )
    target = KvLayout(
        **model, block_size=target_block, dtype=target_type, tp=decode, pp=1 + number % 3
    )
    whole = values((3, 2, tokens.end, heads, 8), getattr(torch, source_type), number)
    sent = converted(converted(whole, getattr(torch, wire)), getattr(torch, target_type))
    senders = [Rank(source, rank, tokens.end, rank) for rank in range(source.num_ranks)]
    for sender in senders:
        sender.write(sender.kv, sender.of(whole, Span(0, tokens.end)), Span(0, tokens.end))
    for target_rank in range(target.num_ranks):
        receiver = Rank(target, target_rank, tokens.end, 100 + target_rank)
        expected = copied(receiver.kv)
        receiver.write(expected, receiver.of(sent, tokens), tokens)
        for rank, sender in enumerate(senders):
            for part in parts(source, rank, target, target_rank):
                form = Form(wire, rng.choice(receiver.memory.digests))
                for move in cut(part, tokens, head_nbytes(8, wire), rng.randrange(700, 9000)):
                    slab = memoryview(bytearray(move.nbytes))
                    packed = sender.memory.pack(sender.blocks, move, form, slab)
                    assert receiver.memory.scatter(receiver.blocks, move, form, slab) == packed
        assert same_bytes(receiver.kv, expected)


def test_all_block_sizes_and_types_are_met() -> None:
    numbers = {i * 3 + heads % 3 for i in range(len(PAIRS)) for heads in (2, 3, 7)}
    assert {number % len(BLOCK_PAIRS) for number in numbers} == set(range(len(BLOCK_PAIRS)))
    assert {number % len(TYPES) for number in numbers} == set(range(len(TYPES)))


LAYOUT = KvLayout(num_layers=4, num_kv_heads=4, head_dim=8, block_size=8, dtype="float32", tp=2)


def make_memory(
    shape: tuple[int, ...] = (4, 2, 24, 2, 8),
    dtype: str = "float32",
    layout: KvLayout = LAYOUT,
    **options: Any,
) -> PagedKvMemory:
    slots = torch.zeros(shape, dtype=getattr(torch, dtype))
    return PagedKvMemory(slots, layout, np.zeros(3, np.uint32), **options)


def test_a_memory_is_that_of_its_rank() -> None:
    memory = make_memory(rank=1)
    assert (memory.rank, memory.layout) == (1, LAYOUT)
    assert memory.digests == ("xxh3", "multiply_sum")
    blocks = BlockTable(block_ids=np.arange(3, dtype=np.int32), generations=np.zeros(3, np.uint32))
    slab = memoryview(bytearray(64))
    own = SlabMove(0, Span(0, 1), Span(2, 3), Span(0, 1), 64)
    memory.pack(blocks, own, Form("float32", "xxh3"), slab)
    for heads in (Span(0, 1), Span(1, 2)):
        foreign = SlabMove(0, Span(0, 1), heads, Span(0, 1), 64)
        with pytest.raises(ValueError, match="heads"):
            memory.pack(blocks, foreign, Form("float32", "xxh3"), slab)


def test_odd_heads_have_no_sums_of_words() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=6, block_size=8, dtype="float32")
    assert make_memory((1, 2, 24, 1, 6), layout=layout).digests == ("xxh3",)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"shape": (4, 2, 24, 4, 8)}, "slots are"),
        ({"shape": (4, 2, 23, 2, 8)}, "slots are"),
        ({"dtype": "float64"}, "layout says float32"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"scales": torch.zeros((4, 2, 24, 2))}, "scales"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make_memory(**arguments)


def test_a_quantised_cache_needs_scales_of_its_shape() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=8, block_size=8, dtype="int8")
    shape = (1, 2, 24, 2, 8)
    make_memory(shape, "int8", layout, scales=torch.zeros(shape[:-1]))
    for scales in (None, torch.zeros((1, 2, 24, 1)), torch.zeros(shape[:-1]).double()):
        with pytest.raises(ValueError, match="scales"):
            make_memory(shape, "int8", layout, scales=scales)


def test_blocks_that_were_given_away_are_not_fresh() -> None:
    memory_generations = np.array([5, 6, 7], np.uint32)
    memory = PagedKvMemory(torch.zeros((4, 2, 24, 2, 8)), LAYOUT, memory_generations)
    blocks = BlockTable(
        block_ids=np.array([2, 0], np.int32), generations=np.array([7, 5], np.uint32)
    )
    first, both = (
        SlabMove(0, Span(0, 1), Span(0, 1), Span(0, tokens), 64 * tokens) for tokens in (8, 9)
    )
    assert memory.is_fresh(blocks, first)
    assert memory.is_fresh(blocks, both)
    memory_generations[0] += 1
    assert memory.is_fresh(blocks, first)
    assert not memory.is_fresh(blocks, both)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_with_and_without_the_compiled_pack_slabs_are_the_same(dtype: str) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    kv = poison((2, 2, 640, 3, 64), getattr(torch, dtype), 1)
    ids = np.random.default_rng(1).permutation(40).astype(np.int32)
    blocks = BlockTable(block_ids=ids, generations=np.zeros(40, np.uint32))
    (move,) = cut(layout.whole, Span(3, 600), layout.head_bytes, 8 << 20)
    found = []
    for use_compiled in (True, False):
        memory = PagedKvMemory(
            kv.elements,
            layout,
            np.zeros(40, np.uint32),
            scales=kv.scales,
            use_compiled=use_compiled,
        )
        slab = memoryview(bytearray(move.nbytes))
        digests = memory.pack(blocks, move, Form(dtype, "xxh3"), slab)
        assert memory.scatter(blocks, move, Form(dtype, "xxh3"), slab) == digests
        found.append((bytes(slab), digests))
    assert found[0] == found[1]
    assert (kv.scales is not None) == (getattr(torch, dtype) in QUANTISED_TYPES)


def test_shards_of_a_slab_count_as_the_model_does() -> None:
    """A stage's memory holds layers [2, 4): the first of them is its own first."""
    layout = KvLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=8, dtype="float32", pp=2)
    rank = Rank(layout, 1, 8, 1)
    assert rank.shard == Shard(Span(2, 4), Span(0, 1))
    move = SlabMove(0, Span(3, 4), Span(0, 1), Span(0, 8), 2 * 8 * 32)
    slab = memoryview(bytearray(move.nbytes))
    rank.memory.pack(rank.blocks, move, Form("float32", "xxh3"), slab)
    expected = picked(rank.kv, rank.slots, (1, 2), (0, 1)).elements
    assert bytes(slab) == expected.numpy().tobytes()
