"""Gather and scatter against copying token by token, over odd shapes and all element types."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.kv_pack.host import gather, scatter
from kvferry.kernels.kv_pack.tiles import TILE_BYTES, num_tiles, tiles

torch.set_num_threads(1)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def byte_sum(number: int, data: memoryview) -> int:
    return number * 1_000_003 + sum(data.tobytes()[:4096]) + data.nbytes


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs included."""
    tensor = torch.zeros(shape, dtype=dtype)
    noise = np.random.default_rng(seed).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(noise))
    return tensor


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@st.composite
def ranges(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int], tuple[int, int]]:
    layers, heads = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_slots, head_dim = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32 - 1))
    slots = random_bytes((layers, 2, num_slots, heads, head_dim), dtype, seed)
    tokens = draw(st.integers(1, num_slots))
    ids = torch.from_numpy(np.random.default_rng(seed).permutation(num_slots)[:tokens])
    layer, head = draw(st.integers(0, layers - 1)), draw(st.integers(0, heads - 1))
    layer_end = draw(st.integers(layer + 1, layers))
    head_end = draw(st.integers(head + 1, heads))
    return slots, ids, (layer, layer_end), (head, head_end)


@settings(max_examples=150, deadline=None)
@given(ranges())
def test_gather_and_scatter_equal_copying_token_by_token(case) -> None:
    slots, ids, layers, heads = case
    part = slots[layers[0] : layers[1], :, :, heads[0] : heads[1]]
    expected = torch.cat([part[:, :, int(slot) : int(slot) + 1] for slot in ids], dim=2)
    slab = memoryview(bytearray(expected.nbytes))
    packed = gather(slots, ids, layers, heads, slab, byte_sum)
    assert bytes(slab) == as_bytes(expected)

    target = random_bytes(tuple(slots.shape), slots.dtype, 3)
    untouched = target.clone()
    written = scatter(target, ids, layers, heads, slab, byte_sum)
    assert written == packed
    for slot in ids:
        untouched[layers[0] : layers[1], :, slot, heads[0] : heads[1]] = slots[
            layers[0] : layers[1], :, slot, heads[0] : heads[1]
        ]
    assert as_bytes(target) == as_bytes(untouched)


@pytest.mark.parametrize(
    ("rows", "tokens", "row_token_bytes"),
    [(1, 1, 4), (6, 10, 64), (2, 5000, 768), (60, 341, 768), (3, 7, TILE_BYTES), (4, 2, 300_000)],
)
def test_tiles_cover_the_slab_in_order(rows: int, tokens: int, row_token_bytes: int) -> None:
    seen = np.zeros((rows, tokens), np.int32)
    offset = 0
    for tile in tiles(rows, tokens, row_token_bytes):
        assert (
            tile.offset
            == offset
            == (tile.row_begin * tokens + tile.token_begin) * (row_token_bytes)
        )
        assert tile.nbytes <= max(TILE_BYTES, row_token_bytes)
        seen[tile.row_begin : tile.row_end, tile.token_begin : tile.token_end] += 1
        offset += tile.nbytes
    assert (seen == 1).all()
    assert offset == rows * tokens * row_token_bytes
    assert num_tiles(rows, tokens, row_token_bytes) == len(
        list(tiles(rows, tokens, row_token_bytes))
    )


def test_many_tiles_round_trip() -> None:
    source = random_bytes((3, 2, 4096, 3, 64), torch.float32, 1)
    ids = torch.randperm(4096)[:1500]
    slab = memoryview(bytearray(2 * 2 * 1500 * 3 * 64 * 4))
    digests = gather(source, ids, (1, 3), (0, 3), slab, byte_sum)
    assert len(digests) > 10
    target = torch.zeros_like(source)
    assert scatter(target, ids, (1, 3), (0, 3), slab, byte_sum) == digests
    assert as_bytes(target[1:, :, ids]) == as_bytes(source[1:, :, ids])
    assert not target[0].any()


@pytest.mark.parametrize("move", [gather, scatter])
def test_refuses_what_does_not_fit(move) -> None:
    slots = torch.zeros((2, 2, 8, 1, 4))
    slab = memoryview(bytearray(2 * 2 * 3 * 4 * 4))
    whole = ((0, 2), (0, 1))
    with pytest.raises(ValueError, match="slab holds"):
        move(slots, torch.tensor([0, 1]), *whole, slab, byte_sum)
    with pytest.raises(IndexError):
        move(slots, torch.tensor([0, 1, 8]), *whole, slab, byte_sum)
    with pytest.raises(IndexError):
        move(slots, torch.tensor([0, 1, -1]), *whole, slab, byte_sum)


def test_scatter_digests_what_it_writes_not_what_the_slab_holds_later() -> None:
    """The slab is shared with the peer: a change between write and digest must not go unseen."""
    slab = memoryview(bytearray(b"\x01" * 64))
    slots = torch.zeros((1, 2, 4, 1, 8), dtype=torch.float32)

    def digest_then_change(number: int, data: memoryview) -> int:
        value = byte_sum(number, data)
        slab[:] = b"\x02" * 64
        return value

    ids = torch.tensor([2])
    digests = scatter(slots, ids, (0, 1), (0, 1), slab, digest_then_change)
    assert as_bytes(slots[:, :, 2]) == b"\x01" * 64
    assert digests == [byte_sum(0, memoryview(b"\x01" * 64))]
