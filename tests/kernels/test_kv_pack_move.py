"""Gather and scatter in Triton's interpreter against plain torch, bit for bit, and that against
slicing: every pair of types, odd ranges, stale blocks, memory around that must stay as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import random_tensors

from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES, dequantised, quantised
from kvferry.kernels.kv_pack import reference, wrapper
from kvferry.kernels.kv_pack.slab import Generations, KvSlots, Range, Tokens, slab_shape

torch.set_num_threads(1)

MAX_TOKENS = 100
TYPES = FLOAT_TYPES + QUANTISED_TYPES

# Relative to the largest value of a head: half a step of the coarser type. bf16 has 8 significant
# bits, fp16 11, int8 is in steps of 1/127 of the largest, E4M3 has 4 significant bits.
ROUNDING = {
    torch.float32: 2.0**-23,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.int8: 0.5 / 127 + 2.0**-20,
    torch.float8_e4m3fn: 2.0**-4,
}


@dataclass
class Move:
    kv: KvSlots
    tokens: Tokens
    layers: Range
    heads: Range
    block_size: int
    stale: set[int]
    """Entries of the block table."""

    def args(self, kv: KvSlots, wire: torch.dtype, slab: torch.Tensor) -> tuple:
        return kv, self.tokens, self.layers, self.heads, wire, slab

    def nbytes(self, wire: torch.dtype) -> int:
        return slab_shape(self.kv, self.tokens, self.layers, self.heads, wire).nbytes


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def equal_bits(a: KvSlots, b: KvSlots) -> bool:
    pairs = [(a.elements, b.elements)]
    if a.scales is not None and b.scales is not None:
        pairs.append((a.scales, b.scales))
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in pairs)


def copied(kv: KvSlots) -> KvSlots:
    return KvSlots(kv.elements.clone(), None if kv.scales is None else kv.scales.clone())


def poisoned(like: KvSlots) -> KvSlots:
    """Memory of the same shape whose every element is NaN (int8: 0x7F) and every scale NaN."""
    kv = copied(like)
    if kv.elements.is_floating_point() and kv.elements.itemsize > 1:
        kv.elements.fill_(torch.nan)
    else:
        kv.elements.view(torch.uint8).fill_(0x7F)
    if kv.scales is not None:
        kv.scales.fill_(torch.nan)
    return kv


def random_cache(seed: int, dtype: torch.dtype, *shape: int) -> KvSlots:
    elements, scales = quantised(random_tensors(seed)(*shape) * 3, dtype)
    return KvSlots(elements.contiguous(), scales)


@st.composite
def moves(draw: st.DrawFn, dtype: torch.dtype) -> Move:
    num_layers, num_heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    block_size = draw(st.sampled_from([1, 8, 16, 96, 256]))
    num_blocks = draw(st.integers(1, 5))
    head_dim = draw(st.sampled_from([4, 16, 20, 64, 80]))
    seed = draw(st.integers(0, 2**32 - 1))
    length = num_blocks * block_size
    begin = draw(st.integers(0, length - 1))
    end = draw(st.integers(begin + 1, min(length, begin + MAX_TOKENS)))
    layer, head = draw(st.integers(0, num_layers - 1)), draw(st.integers(0, num_heads - 1))
    layers = layer, draw(st.integers(layer + 1, num_layers))
    heads = head, draw(st.integers(head + 1, num_heads))
    generator = torch.Generator().manual_seed(seed)
    # More blocks than the sequence has: the others belong to somebody else.
    blocks = torch.randperm(num_blocks + 2, generator=generator)[:num_blocks]
    live = torch.randint(0, 9, (num_blocks + 2,), generator=generator)
    leased = live[blocks]
    stale = draw(st.sets(st.integers(0, num_blocks - 1), max_size=2))
    for entry in stale:
        leased[entry] -= 1
    kv = random_cache(
        seed, dtype, num_layers, 2, (num_blocks + 2) * block_size, num_heads, head_dim
    )
    generations = Generations(live, leased) if stale or draw(st.booleans()) else None
    tokens = Tokens(
        blocks=blocks.to(draw(st.sampled_from([torch.int32, torch.int64]))),
        begin=begin,
        end=end,
        block_size=block_size,
        generations=generations,
    )
    return Move(kv, tokens, layers, heads, block_size, stale)


def slots_of(move: Move) -> tuple[list[int], list[bool]]:
    """Slot of every token of the range, and whether its block is fresh: one by one."""
    slots, fresh = [], []
    for position in range(move.tokens.begin, move.tokens.end):
        entry, offset = divmod(position, move.block_size)
        slots.append(int(move.tokens.blocks[entry]) * move.block_size + offset)
        fresh.append(entry not in move.stale)
    return slots, fresh


def sliced(move: Move, kv: KvSlots) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements and scales of the range, token after token, zeros where stale."""
    layers, heads = slice(*move.layers), slice(*move.heads)
    slots, fresh = slots_of(move)
    none = torch.zeros_like(kv.elements[layers, :, 0, heads])
    parts = [
        kv.elements[layers, :, slot, heads] if ok else none
        for slot, ok in zip(slots, fresh, strict=True)
    ]
    elements = torch.stack(parts, dim=2)
    if kv.scales is None:
        return elements, None
    none = torch.zeros_like(kv.scales[layers, :, 0, heads])
    scales = [
        kv.scales[layers, :, slot, heads] if ok else none
        for slot, ok in zip(slots, fresh, strict=True)
    ]
    return elements, torch.stack(scales, dim=2)


@settings(max_examples=15)
@given(st.data())
def test_one_type_moves_bytes(data: st.DataObject) -> None:
    """Gather is slicing; scatter writes these bytes and no other; both have the same sums."""
    dtype = data.draw(st.sampled_from(TYPES))
    move = data.draw(moves(dtype))
    elements, scales = sliced(move, move.kv)
    expected = as_bytes(elements).flatten()
    if scales is not None:
        expected = torch.cat([expected, as_bytes(scales).flatten()])
    _, fresh = slots_of(move)
    num_stale = fresh.count(False) * 2 * (move.layers[1] - move.layers[0])

    slab, plain_slab = (torch.empty(move.nbytes(dtype), dtype=torch.uint8) for _ in range(2))
    totals = wrapper.gather(*move.args(move.kv, dtype, slab))
    assert torch.equal(slab, expected)
    assert int(totals[0]) == num_stale
    assert torch.equal(totals, reference.gather(*move.args(move.kv, dtype, plain_slab)))
    assert torch.equal(slab, plain_slab)

    target, plain_target, by_hand = (poisoned(move.kv) for _ in range(3))
    assert torch.equal(wrapper.scatter(*move.args(target, dtype, slab)), totals)
    assert torch.equal(reference.scatter(*move.args(plain_target, dtype, slab)), totals)
    layers, heads = slice(*move.layers), slice(*move.heads)
    for slot, ok in zip(*slots_of(move), strict=True):
        if ok:
            by_hand.elements[layers, :, slot, heads] = move.kv.elements[layers, :, slot, heads]
            if by_hand.scales is not None and move.kv.scales is not None:
                by_hand.scales[layers, :, slot, heads] = move.kv.scales[layers, :, slot, heads]
    assert equal_bits(target, by_hand)
    assert equal_bits(plain_target, by_hand)


@settings(max_examples=15)
@given(st.data())
def test_conversions_are_the_reference_bit_for_bit(data: st.DataObject) -> None:
    """Which itself is within one rounding of the wire's type and one of the cache's."""
    dtype, wire = data.draw(
        st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)).filter(
            lambda pair: pair[0] != pair[1]
        )
    )
    move = data.draw(moves(dtype))
    slab, plain_slab = (torch.empty(move.nbytes(wire), dtype=torch.uint8) for _ in range(2))
    totals = wrapper.gather(*move.args(move.kv, wire, slab))
    assert torch.equal(totals, reference.gather(*move.args(move.kv, wire, plain_slab)))
    assert torch.equal(slab, plain_slab)

    target, plain_target = poisoned(move.kv), poisoned(move.kv)
    assert torch.equal(wrapper.scatter(*move.args(target, wire, slab)), totals)
    assert torch.equal(reference.scatter(*move.args(plain_target, wire, slab)), totals)
    assert equal_bits(target, plain_target)

    before = dequantised(*sliced(move, move.kv))
    after = dequantised(*sliced(move, target))
    largest = before.abs().amax(-1, keepdim=True)
    bound = (ROUNDING[wire] + ROUNDING[dtype] * (1 + ROUNDING[wire])) * largest
    assert bool(((after - before).abs() <= bound).all())


@settings(max_examples=5)
@given(st.data())
def test_conversion_touches_nothing_around(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(TYPES))
    wire = torch.int8 if dtype is torch.float8_e4m3fn else torch.float8_e4m3fn
    move = data.draw(moves(dtype))
    slab = torch.empty(move.nbytes(wire), dtype=torch.uint8)
    wrapper.gather(*move.args(move.kv, wire, slab))
    target, before = poisoned(move.kv), poisoned(move.kv)
    wrapper.scatter(*move.args(target, wire, slab))
    layers, heads = slice(*move.layers), slice(*move.heads)
    for slot, ok in zip(*slots_of(move), strict=True):
        if ok:
            for kv in (target, before):
                kv.elements.view(torch.uint8)[layers, :, slot, heads] = 0
                if kv.scales is not None:
                    kv.scales[layers, :, slot, heads] = 0
    assert equal_bits(target, before)


@pytest.mark.parametrize("size", [(8, 256), (256, 8), (16, 32)])
def test_block_sizes_are_free_on_both_sides(size: tuple[int, int]) -> None:
    """What one block size packed, another unpacks; wire and sums know nothing of blocks."""
    sent, received = size
    source = random_cache(1, torch.bfloat16, 2, 2, 512, 2, 16)
    target = poisoned(source)
    tables = [torch.randperm(512 // block_size) for block_size in size]
    slab = torch.empty(2 * 2 * 300 * 2 * 16 * 2, dtype=torch.uint8)
    tokens, other = (
        Tokens(blocks=table, begin=7, end=307, block_size=block_size)
        for table, block_size in zip(tables, (sent, received), strict=True)
    )
    whole = (0, 2), (0, 2), torch.bfloat16, slab
    assert torch.equal(
        wrapper.gather(source, tokens, *whole), wrapper.scatter(target, other, *whole)
    )
    for position in (7, 8, 255, 256, 306):
        there, here = (
            int(table[position // block_size]) * block_size + position % block_size
            for table, block_size in zip(tables, size, strict=True)
        )
        assert torch.equal(source.elements[:, :, there], target.elements[:, :, here])


@pytest.mark.parametrize(
    ("layers", "tokens", "heads", "head_dim", "dtype", "wire", "num_tiles"),
    [
        (1, 600, 3, 64, torch.float32, torch.float32, 4),
        (3, 200, 2, 128, torch.bfloat16, torch.bfloat16, 2),
        (1, 6, 5, 256, torch.float32, torch.float32, 1),
        (1, 200, 4, 128, torch.float8_e4m3fn, torch.float32, 4),
    ],
    ids=["tiles of a row", "rows of a tile", "a token wider than a program", "converted"],
)
def test_the_split_of_the_work_leaves_no_trace(
    layers: int,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    wire: torch.dtype,
    num_tiles: int,
) -> None:
    """Several programs per tile, tiles per row and rows per tile."""
    kv = random_cache(3, dtype, layers, 2, tokens + 1, heads, head_dim)
    slots = Tokens(blocks=torch.randperm(tokens + 1), begin=1, end=tokens + 1, block_size=1)
    whole = slots, (0, layers), (0, heads), wire
    shape = slab_shape(kv, *whole)
    assert shape.cut.num_tiles == num_tiles
    slab, plain = (torch.empty(shape.nbytes, dtype=torch.uint8) for _ in range(2))
    totals = wrapper.gather(kv, *whole, slab)
    assert torch.equal(totals, reference.gather(kv, *whole, plain))
    assert torch.equal(slab, plain)
    target, plain_target = poisoned(kv), poisoned(kv)
    assert torch.equal(wrapper.scatter(target, *whole, slab), totals)
    reference.scatter(plain_target, *whole, slab)
    assert equal_bits(target, plain_target)


def test_scatter_tells_which_tile_was_damaged() -> None:
    kv = random_cache(4, torch.float32, 1, 2, 400, 1, 128)
    whole = Tokens(blocks=torch.arange(400), begin=0, end=400, block_size=1), (0, 1), (0, 1)
    slab = torch.empty(2 * 400 * 512, dtype=torch.uint8)
    totals = wrapper.gather(kv, *whole, torch.float32, slab)
    slab[-1] ^= 0x80
    found = wrapper.scatter(kv, *whole, torch.float32, slab)
    assert (found != totals).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_block_outside_the_cache_is_left_out(dtype: torch.dtype) -> None:
    kv = random_cache(2, dtype, 1, 2, 32, 1, 16)
    tokens = Tokens(blocks=torch.tensor([1, -1, 4, 2**40]), begin=0, end=32, block_size=8)
    shape = slab_shape(kv, tokens, (0, 1), (0, 1), dtype)
    slab, plain = (torch.empty(shape.nbytes, dtype=torch.uint8) for _ in range(2))
    whole = (0, 1), (0, 1), dtype
    totals = wrapper.gather(kv, tokens, *whole, slab)
    assert int(totals[0]) == 2 * 24
    assert torch.equal(totals, reference.gather(kv, tokens, *whole, plain))
    assert torch.equal(slab, plain)
    before = copied(kv)
    assert torch.equal(wrapper.scatter(kv, tokens, *whole, slab), totals)
    assert equal_bits(kv, before)


def test_bad_arguments_are_named() -> None:
    kv = KvSlots(torch.zeros(2, 2, 32, 2, 8))
    table = torch.arange(4)
    tokens = Tokens(blocks=table, begin=0, end=8, block_size=8)
    too_long = Tokens(blocks=table, begin=0, end=33, block_size=8)
    generations = Generations(table, table[:3])
    too_few = Tokens(blocks=table, begin=0, end=8, block_size=8, generations=generations)
    slab = torch.zeros(2 * 2 * 8 * 2 * 8 * 4, dtype=torch.uint8)
    whole = (0, 2), (0, 2), torch.float32
    for module in (reference, wrapper):
        for move in (module.gather, module.scatter):
            move(kv, tokens, *whole, slab)
            with pytest.raises(ValueError, match="slab: holds"):
                move(kv, tokens, *whole, slab[:-4])
            with pytest.raises(ValueError, match="layers"):
                move(kv, tokens, (0, 3), (0, 2), torch.float32, slab)
            with pytest.raises(ValueError, match="heads"):
                move(kv, tokens, (0, 2), (1, 1), torch.float32, slab)
            with pytest.raises(ValueError, match="wire"):
                move(kv, tokens, (0, 2), (0, 2), torch.float64, slab)
            with pytest.raises(ValueError, match=r"kv\.scales"):
                move(KvSlots(kv.elements.to(torch.int8)), tokens, *whole, slab)
            with pytest.raises(ValueError, match="tokens"):
                move(kv, too_long, *whole, slab)
            with pytest.raises(ValueError, match="leased"):
                move(kv, too_few, *whole, slab)
