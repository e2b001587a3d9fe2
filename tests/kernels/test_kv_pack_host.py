"""Gather and scatter on the host against slicing token by token, over odd shapes and all types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_caches import (
    EXACT_TYPES,
    as_bytes,
    converted,
    copied,
    noise,
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
from kvferry.kernels.kv_pack.host import gather, scatter, scatter_tiles
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_digest import HOST_DIGESTS
from kvferry.kernels.kv_pack.slab import KvSlots, Tokens
from kvferry.kernels.kv_pack.tiles import TILE_BYTES, num_tiles, tiles

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


def make_move(**changes: Any) -> HostMove:
    fields: dict[str, Any] = {
        "blocks": np.arange(3, dtype=np.int32),
        "tokens": (0, 3),
        "layers": (0, 1),
        "heads": (0, 1),
        "wire": torch.float32,
        "digest": "xxh3",
        "slab_index": 5,
    }
    return HostMove(**(fields | changes))


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
    fields = {name: getattr(move, name) for name in HostMove.__slots__}
    return HostMove(**(fields | {"wire": wire, "digest": digest}))


def gathered(kv: KvSlots, case: Case, move: HostMove) -> tuple[memoryview, list[int]]:
    cache = HostCache(kv, case.block_size)
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    return slab, gather(cache, move, slab)


@settings(max_examples=150)
@given(cases(st.integers(1, 9)), st.sampled_from(EXACT_TYPES), st.integers(0, 2**32 - 1))
def test_bytes_are_those_of_slicing_token_by_token(case, dtype, seed) -> None:
    source, move = poison(case.shape, dtype, seed), moved(case.move, dtype)
    part = picked(source, *case.place)
    slab, packed = gathered(source, case, move)
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
    slab, packed = gathered(source, case, move)
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
    slab, packed = gathered(source, case, move)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_xxh3_digests_are_those_of_the_tiles_elements_and_then_scales(dtype: torch.dtype) -> None:
    kv = values((2, 2, 4096, 3, 64), dtype, 1)
    move = make_move(
        blocks=np.random.default_rng(1).permutation(256).astype(np.int32),
        tokens=(3, 3900),
        layers=(0, 2),
        heads=(0, 3),
        wire=dtype,
    )
    cache = HostCache(kv, 16)
    shape = cache.shape(move)
    slab = memoryview(bytearray(shape.nbytes))
    packed = gather(cache, move, slab)
    expected = []
    for number, tile in enumerate(tiles(shape.rows, shape.tokens, shape.token_words * 4)):
        data = bytes(slab[tile.offset : tile.offset + tile.nbytes])
        if dtype is torch.int8:
            begin, end = tile.offset // 192 * 12, (tile.offset + tile.nbytes) // 192 * 12
            scales = slab[shape.elements_nbytes :]
            data += bytes(scales[begin:end])
        expected.append(xxhash.xxh3_64_intdigest(data, seed=5 << 32 | number))
    assert packed == expected
    assert len(packed) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_sums_number_tokens_through_all_tiles(dtype: torch.dtype) -> None:
    kv = values((1, 2, 4096, 2, 128), dtype, 1)
    move = make_move(
        blocks=np.random.default_rng(1).permutation(256).astype(np.int32),
        tokens=(3, 3900),
        heads=(0, 2),
        wire=dtype,
        digest="multiply_sum",
    )
    case = Case((1, 2, 4096, 2, 128), 16, move)
    slab, packed = gathered(kv, case, move)
    tokens = Tokens(blocks=torch.from_numpy(move.blocks), begin=3, end=3900, block_size=16)
    theirs = torch.zeros(len(slab), dtype=torch.uint8)
    totals = reference.gather(kv, tokens, move.layers, move.heads, dtype, theirs)
    assert packed == mixed(totals[1:].numpy(), move.slab_index)
    assert len(packed) > 4 or dtype is torch.int8


@pytest.mark.parametrize("digest", sorted(HOST_DIGESTS))
def test_a_digest_tells_bytes_scales_tiles_and_slabs_apart(digest: str) -> None:
    kv = KvSlots(torch.ones((1, 2, 4096, 1, 128), dtype=torch.int8), torch.ones((1, 2, 4096, 1)))
    move = make_move(
        blocks=np.arange(256, dtype=np.int32), tokens=(0, 4096), wire=torch.int8, digest=digest
    )
    cache = HostCache(kv, 16)
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    packed = gather(cache, move, slab)
    assert len(set(packed)) == len(packed) == 4
    again = make_move(
        blocks=move.blocks, tokens=move.tokens, wire=torch.int8, digest=digest, slab_index=6
    )
    assert not set(packed) & set(gather(cache, again, slab))
    for place in (0, 2 * 4096 * 128 - 1, 2 * 4096 * 128, len(slab) - 1):
        slab[place] ^= 1
        assert sum(a != b for a, b in zip(packed, scatter(cache, move, slab), strict=True)) == 1
        slab[place] ^= 1


@pytest.mark.parametrize(
    ("rows", "tokens", "row_token_bytes"),
    [
        (1, 1, 4),
        (6, 10, 64),
        (2, 5000, 768),
        (60, 341, 768),
        (60, 364, 768),
        (60, 600, 768),
        (3, 7, TILE_BYTES),
        (4, 2, 300_000),
        (8, 180_000, 1),
    ],
)
def test_tiles_cover_the_slab_in_order(rows: int, tokens: int, row_token_bytes: int) -> None:
    seen = np.zeros((rows, tokens), np.int32)
    offset = 0
    for tile in tiles(rows, tokens, row_token_bytes):
        first = tile.row_begin * tokens + tile.token_begin
        assert tile.offset == offset == first * row_token_bytes
        assert tile.nbytes <= max(TILE_BYTES * 3 // 2, row_token_bytes)
        assert tile.row_end == tile.row_begin + 1 or tile.token_end - tile.token_begin == tokens
        seen[tile.row_begin : tile.row_end, tile.token_begin : tile.token_end] += 1
        offset += tile.nbytes
    assert (seen == 1).all()
    assert offset == rows * tokens * row_token_bytes
    cut = list(tiles(rows, tokens, row_token_bytes))
    assert num_tiles(rows, tokens, row_token_bytes) == len(cut)
    if row_token_bytes * tokens > TILE_BYTES > row_token_bytes:
        assert min(tile.nbytes for tile in cut) > TILE_BYTES // 2


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


class ChangingDigest:
    """Changes the slab as soon as a tile of it was digested."""

    def __init__(self, slab: memoryview) -> None:
        self._slab, self._values = slab, []

    def add(self, tile: Any, elements: Any, scales: Any) -> None:
        self._values.append(elements.tobytes() + scales.tobytes())
        self._slab[:] = b"\x02" * len(self._slab)

    def finish(self) -> list[Any]:
        return self._values


def test_scatter_digests_what_it_writes_not_what_the_slab_holds_later() -> None:
    """The slab is shared with the peer: a change between digest and write must not go unseen."""
    kv = KvSlots(noise((1, 2, 4, 1, 8), torch.int8, 1), noise((1, 2, 4, 1), torch.float32, 2))
    move = make_move(tokens=(2, 3), blocks=np.arange(4, dtype=np.int32), wire=torch.int8)
    slab = memoryview(bytearray(b"\x01" * 24))
    assert scatter_tiles(HostCache(kv, 1), move, slab, ChangingDigest(slab)) == [b"\x01" * 24]
    assert slab_bytes_of(picked(kv, [2], (0, 1), (0, 1))) == b"\x01" * 24


def test_digests_are_those_of_what_was_written_whatever_a_peer_does_meanwhile(
    scribbled: Any,
) -> None:
    kv = values((1, 2, 2048, 2, 64), torch.float32, 1)
    cache = HostCache(kv, 16)
    blocks = np.random.default_rng(1).permutation(128).astype(np.int32)
    move = make_move(blocks=blocks, tokens=(1, 2047), heads=(0, 2))
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    gather(cache, move, slab)
    with scribbled(slab):
        for _ in range(20):
            found = scatter(cache, move, slab)
            private = memoryview(bytearray(len(slab)))
            assert gather(cache, move, private) == found
