"""Digests on the host: of which bytes they are, tile by tile, whatever a peer does meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from host_moves import gathered, make_move
from hypothesis import given
from hypothesis import strategies as st
from paged_caches import (
    noise,
    picked,
    slab_bytes_of,
    values,
)

from kvferry.kernels.kv_pack import reference
from kvferry.kernels.kv_pack.digest import digests as mixed
from kvferry.kernels.kv_pack.host import gather, scatter, scatter_tiles
from kvferry.kernels.kv_pack.host_cache import HostCache
from kvferry.kernels.kv_pack.host_digest import HOST_DIGESTS
from kvferry.kernels.kv_pack.slab import KvSlots, Tokens
from kvferry.kernels.kv_pack.tiles import TILE_BYTES, TileCut, most_tiles, tiles

torch.set_num_threads(1)


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
    slab, packed = gathered(kv, 16, move)
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
    assert TileCut.of(rows, tokens, row_token_bytes).num_tiles == len(cut)
    if row_token_bytes * tokens > TILE_BYTES > row_token_bytes:
        assert min(tile.nbytes for tile in cut) > TILE_BYTES // 2


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


@given(
    rows=st.integers(1, 300),
    tokens=st.integers(1, 5000),
    row_token_bytes=st.sampled_from([4, 12, 68, 256, 1024, 5000, 40_000, 600_000]),
)
def test_tiles_are_no_more_than_a_slab_may_have(rows, tokens, row_token_bytes) -> None:
    nbytes = rows * tokens * row_token_bytes
    assert TileCut.of(rows, tokens, row_token_bytes).num_tiles <= most_tiles(nbytes)
