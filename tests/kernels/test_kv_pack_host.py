"""Gather and scatter on the host against slicing token by token, over odd shapes and all types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from host_moves import gathered, make_move
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_caches import (
    EXACT_TYPES,
    as_bytes,
    converted,
    copied,
    picked,
    poison,
    put,
    same_bytes,
    slab_bytes_of,
    slots_of,
    values,
)

from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES
from kvferry.kernels.kv_pack import reference
from kvferry.kernels.kv_pack.digest import digests as mixed
from kvferry.kernels.kv_pack.host import gather, scatter
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_digest import HOST_DIGESTS
from kvferry.kernels.kv_pack.slab import KvSlots, Tokens

torch.set_num_threads(1)

ALL_TYPES = EXACT_TYPES + QUANTISED_TYPES
CONVERSIONS = [
    (source, wire, target)
    for source in EXACT_TYPES
    for wire in ALL_TYPES
    for target in ALL_TYPES
    if target in EXACT_TYPES or target is wire or wire in EXACT_TYPES
] + [(dtype, dtype, dtype) for dtype in QUANTISED_TYPES]


@dataclass(frozen=True)
class Case:
    """A range, and the layout of a cache that has it."""

    shape: tuple[int, int, int, int, int]
    block_size: int
    move: HostMove

    @property
    def slots(self) -> list[int]:
        return slots_of(self.move.blocks, *self.move.tokens, self.block_size)

    @property
    def place(self) -> tuple[Any, ...]:
        return self.slots, self.move.layers, self.move.heads


@st.composite
def span(draw: st.DrawFn, count: int) -> tuple[int, int]:
    begin = draw(st.integers(0, count - 1))
    return begin, draw(st.integers(begin + 1, count))


@st.composite
def cases(draw: st.DrawFn, head_dims: Any, **changes: Any) -> Case:
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    block_size, num_blocks = draw(st.integers(1, 17)), draw(st.integers(1, 9))
    used = draw(st.integers(1, num_blocks))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    move = make_move(
        blocks=rng.permutation(num_blocks)[:used].astype(np.int32),
        tokens=draw(span(used * block_size)),
        layers=draw(span(layers)),
        heads=draw(span(heads)),
        slab_index=draw(st.integers(0, 2**20)),
        **changes,
    )
    shape = (layers, 2, num_blocks * block_size, heads, draw(head_dims))
    return Case(shape, block_size, move)


def moved(move: HostMove, wire: torch.dtype, digest: str = "xxh3") -> HostMove:
    return move._replace(wire=wire, digest=digest)


@settings(max_examples=150)
@given(cases(st.integers(1, 9)), st.sampled_from(EXACT_TYPES), st.integers(0, 2**32 - 1))
def test_bytes_are_those_of_slicing_token_by_token(case, dtype, seed) -> None:
    source, move = poison(case.shape, dtype, seed), moved(case.move, dtype)
    part = picked(source, *case.place)
    slab, packed = gathered(source, case.block_size, move)
    assert bytes(slab) == slab_bytes_of(part)

    target = poison(case.shape, dtype, seed + 1)
    expected = copied(target)
    put(expected, *case.place, part)
    assert scatter(HostCache(target, case.block_size), move, slab) == packed
    assert same_bytes(target, expected)


@settings(max_examples=200)
@given(
    cases(st.sampled_from([4, 8, 20])),
    st.sampled_from(CONVERSIONS),
    st.sampled_from(sorted(HOST_DIGESTS)),
    st.integers(0, 2**32 - 1),
)
def test_types_are_converted_on_the_way_and_nothing_else_is_touched(
    case, types, digest, seed
) -> None:
    source_dtype, wire, target_dtype = types
    source, move = values(case.shape, source_dtype, seed), moved(case.move, wire, digest)
    part = converted(picked(source, *case.place), wire)
    slab, packed = gathered(source, case.block_size, move)
    assert bytes(slab) == slab_bytes_of(part)

    target = poison(case.shape, target_dtype, seed)
    expected = copied(target)
    put(expected, *case.place, converted(part, target_dtype))
    assert scatter(HostCache(target, case.block_size), move, slab) == packed
    assert same_bytes(target, expected)


@settings(max_examples=100)
@given(
    cases(st.sampled_from([4, 8, 20])),
    st.sampled_from([t for t in CONVERSIONS if t[0] in FLOAT_TYPES + QUANTISED_TYPES]),
    st.integers(0, 2**32 - 1),
)
def test_a_gpu_would_make_the_same_slab_and_digests(case, types, seed) -> None:
    source_dtype, wire, _ = types
    if torch.float64 in types:
        return
    source, move = values(case.shape, source_dtype, seed), moved(case.move, wire, "multiply_sum")
    slab, packed = gathered(source, case.block_size, move)
    theirs = torch.zeros(len(slab), dtype=torch.uint8)
    tokens = Tokens(
        blocks=torch.from_numpy(move.blocks),
        begin=move.tokens[0],
        end=move.tokens[1],
        block_size=case.block_size,
    )
    totals = reference.gather(source, tokens, move.layers, move.heads, wire, theirs)
    assert as_bytes(theirs) == bytes(slab)
    assert packed == mixed(totals[1:].numpy(), move.slab_index)


@pytest.mark.parametrize(
    ("changes", "nbytes", "error", "match"),
    [
        ({}, 1, ValueError, "holds 1 bytes, the range 96"),
        ({"layers": (0, 3)}, 96, ValueError, r"layers: \[0, 3\)"),
        ({"heads": (1, 1)}, 96, ValueError, r"heads: \[1, 1\)"),
        ({"tokens": (0, 13)}, 96, ValueError, r"tokens: \[0, 13\)"),
        ({"tokens": (-1, 2)}, 96, ValueError, r"tokens: \[-1, 2\)"),
        ({"blocks": np.array([2], np.int32)}, 96, IndexError, "outside the cache of 2"),
        ({"blocks": np.array([-1], np.int32)}, 96, IndexError, "outside the cache of 2"),
    ],
)
def test_refuses_what_does_not_fit(changes, nbytes, error, match) -> None:
    kv = KvSlots(torch.zeros((2, 2, 8, 1, 4)))
    untouched = copied(kv)
    for move in (gather, scatter):
        with pytest.raises(error, match=match):
            move(HostCache(kv, 4), make_move(**changes), memoryview(bytearray(nbytes)))
    assert same_bytes(kv, untouched)


def test_blocks_that_are_not_moved_may_be_anything() -> None:
    kv = poison((1, 2, 8, 1, 4), torch.float32, 1)
    move = make_move(blocks=np.array([99, 1, -7], np.int32), tokens=(5, 7))
    slab = memoryview(bytearray(2 * 2 * 16))
    gather(HostCache(kv, 4), move, slab)
    assert bytes(slab) == slab_bytes_of(picked(kv, [5, 6], (0, 1), (0, 1)))


def test_heads_that_are_no_whole_words_are_not_quantised() -> None:
    cache = HostCache(KvSlots(torch.zeros((1, 2, 8, 1, 6))), 4)
    with pytest.raises(ValueError, match=r"6 of torch\.int8"):
        cache.shape(make_move(wire=torch.int8))


def test_a_cache_has_scales_if_it_is_quantised_and_only_then() -> None:
    with pytest.raises(ValueError, match=r"kv\.scales"):
        HostCache(KvSlots(torch.zeros((1, 2, 8, 1, 4)), torch.zeros((1, 2, 8, 1))), 4)
    with pytest.raises(ValueError, match=r"kv\.scales"):
        HostCache(KvSlots(torch.zeros((1, 2, 8, 1, 4), dtype=torch.int8)), 4)
    with pytest.raises(ValueError, match=r"kv\.elements"):
        HostCache(KvSlots(torch.zeros((1, 2, 8, 4, 2)).transpose(3, 4)), 4)
