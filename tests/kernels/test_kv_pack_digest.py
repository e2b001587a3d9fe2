"""What the GPU's digest finds: changes within a word, exchanges, shifts, zeros in a wrong place."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.kv_pack.digest import COLUMNS, digests, keys, tile_sums
from kvferry.kernels.kv_pack.slab import SlabShape
from kvferry.kernels.kv_pack.tiles import TILE_BYTES

torch.set_num_threads(1)

WORD = 2**32


def shape_of(rows: int, tokens: int, words: int) -> SlabShape:
    return SlabShape(rows=rows, tokens=tokens, heads=1, head_dim=words, dtype=torch.float32)


def digests_of(words: np.ndarray, slab_index: int = 0) -> list[int]:
    """Of uint32 words [R, T, W]."""
    slab = torch.from_numpy(words.copy()).view(torch.uint8).flatten()
    return digests(tile_sums(slab, shape_of(*words.shape)).numpy(), slab_index)


@st.composite
def slabs(draw: st.DrawFn) -> np.ndarray:
    """Random words, or such as real mistakes are made of: few values, zeros, top bits alone."""
    rows, tokens, words = (draw(st.integers(1, n)) for n in (4, 12, 24))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    noise = generator.integers(0, WORD, (rows, tokens, words), dtype=np.uint32)
    kind = draw(st.sampled_from(["noise", "few", "sparse", "top bits"]))
    masks = {"noise": WORD - 1, "few": 1, "sparse": WORD - 1, "top bits": 1 << 31}
    noise &= np.uint32(masks[kind])
    if kind == "sparse":
        noise *= generator.random(noise.shape) < 0.1
    return noise


def exact(words: np.ndarray) -> list[int]:
    """The sums of the module's formula in Python's integers, word by word."""
    shape = shape_of(*words.shape)
    cut = shape.cut
    sums = [0] * cut.num_tiles
    column_keys = [key_of(column | COLUMNS) for column in range(words.shape[2])]
    for (row, token), _ in np.ndenumerate(words[:, :, 0]):
        tile = row // cut.rows_per_tile * cut.tiles_per_row + token // cut.tokens_per_tile
        inner = sum(int(w) * k for w, k in zip(words[row, token], column_keys, strict=True))
        sums[tile] += key_of(row * words.shape[1] + token) * (1 + inner)
    return [value % 2**64 for value in sums]


def key_of(position: int) -> int:
    return int(keys(torch.tensor([position]))[0]) % 2**64


@settings(max_examples=40)
@given(slabs())
def test_sums_are_the_formula(words: np.ndarray) -> None:
    slab = torch.from_numpy(words.copy()).view(torch.uint8).flatten()
    sums = tile_sums(slab, shape_of(*words.shape))
    assert [value % 2**64 for value in sums.tolist()] == exact(words)


@settings(max_examples=200)
@given(slabs(), st.data())
def test_any_change_within_a_word_is_found(words: np.ndarray, data: st.DataObject) -> None:
    place = tuple(data.draw(st.integers(0, n - 1)) for n in words.shape)
    change = data.draw(
        st.one_of(st.integers(0, 31).map(lambda bit: 1 << bit), st.integers(1, WORD - 1))
    )
    damaged = words.copy()
    damaged[place] ^= np.uint32(change)
    assert digests_of(damaged) != digests_of(words)


@settings(max_examples=200)
@given(slabs(), st.data())
def test_exchanges_are_found(words: np.ndarray, data: st.DataObject) -> None:
    """Of two words anywhere, of two tokens, of two rows, of two columns."""
    flat = data.draw(st.sampled_from(["word", "token", "row", "column"]))
    damaged = words.copy()
    view = {
        "word": damaged.reshape(-1, 1),
        "token": damaged.reshape(-1, words.shape[2]),
        "row": damaged,
        "column": np.moveaxis(damaged, 2, 0),
    }[flat]
    a, b = (data.draw(st.integers(0, len(view) - 1)) for _ in range(2))
    view[[a, b]] = view[[b, a]]
    assert (digests_of(damaged) == digests_of(words)) == np.array_equal(damaged, words)


@settings(max_examples=200)
@given(slabs(), st.data())
def test_shifts_tears_and_zeros_are_found(words: np.ndarray, data: st.DataObject) -> None:
    flat = words.reshape(-1).copy()
    begin = data.draw(st.integers(0, len(flat)))
    kind = data.draw(st.sampled_from(["shift", "tear", "zeros", "reverse"]))
    if kind == "shift":
        flat = np.roll(flat, data.draw(st.integers(1, len(flat))))
    elif kind == "tear":
        # The end of an older slab shows where the write stopped.
        flat[begin:] = np.roll(flat, 7)[begin:]
    elif kind == "zeros":
        flat[begin:] = 0
    else:
        flat = flat[::-1].copy()
    damaged = flat.reshape(words.shape)
    assert (digests_of(damaged) == digests_of(words)) == np.array_equal(damaged, words)


@settings(max_examples=50)
@given(st.integers(2, 12), st.integers(1, 8), st.data())
def test_a_lost_or_misplaced_token_is_found(tokens: int, words: int, data: st.DataObject) -> None:
    """One token of data among zeros, at any place; and slabs of zeros of two lengths."""
    a, b = (data.draw(st.integers(0, tokens - 1)) for _ in range(2))
    first, second = (np.zeros((1, tokens, words), np.uint32) for _ in range(2))
    first[0, a], second[0, b] = 5, 5
    assert (digests_of(first) == digests_of(second)) == (a == b)
    none = np.zeros((1, tokens, words), np.uint32)
    assert digests_of(none) != digests_of(none[:, 1:])
    assert digests_of(none) != digests_of(first)


def test_equal_bytes_have_other_digests_in_another_tile_or_slab() -> None:
    """A tile is one row here; all rows hold the same."""
    tokens = TILE_BYTES // 4096
    words = np.tile(np.arange(1024, dtype=np.uint32), (4, tokens, 1))
    of_two = digests_of(words, 0) + digests_of(words, 1)
    assert len(set(of_two)) == 8


def test_keys_are_odd_and_differ_in_their_low_half() -> None:
    """The ground of what is always found; tokens and columns taken together."""
    dense = torch.arange(1 << 17)
    positions = torch.cat([dense, dense | COLUMNS, torch.randint(1 << 17, COLUMNS, (1 << 16,))])
    found = keys(positions.unique())
    assert bool((found & 1 == 1).all())
    low = found & (WORD - 1)
    assert len(low.unique()) == len(low)
    assert len((found >> 32).unique()) > 0.99 * len(found)


def test_scales_are_digested() -> None:
    shape = SlabShape(rows=2, tokens=3, heads=2, head_dim=8, dtype=torch.int8)
    slab = torch.zeros(shape.nbytes, dtype=torch.uint8)
    before = digests(tile_sums(slab, shape).numpy(), 0)
    for offset in range(shape.elements_nbytes, shape.nbytes):
        damaged = slab.clone()
        damaged[offset] ^= 1
        assert digests(tile_sums(damaged, shape).numpy(), 0) != before
