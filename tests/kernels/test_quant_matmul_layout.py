"""The layout of quantised weights, the quantisation to them, and how their products are split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import random_tensors

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip
from kvferry.kernels.quant_matmul import reference
from kvferry.kernels.quant_matmul.configs import (
    CANDIDATES,
    FIXED,
    TILES,
    split_for,
    tile_for,
)
from kvferry.kernels.quant_matmul.layout import UNIT, by_group, by_unit, pack, unpack

SCALES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_code_lies_where_the_layout_says(bits: int) -> None:
    n, k = 3, 288
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (n, k))
    packed = pack(codes, bits)
    assert packed.shape == (3, n, 8 * bits)
    assert packed.dtype is torch.int16
    for row in range(n):
        for i in range(k):
            unit, place, j = i // 128, i % 128 // 32, i % 32
            word, field = (j, place) if bits == 4 else (32 * (place // 2) + j, place % 2)
            bits_there = int(packed[unit, row, word]) >> (bits * field)
            assert (bits_there - int(codes[row, i])) % 2**bits == 0


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 9), k=st.integers(1, 300))
def test_unpack_undoes_pack(seed: int, n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for bits, low in ((4, 0), (8, -128)):
        codes = torch.randint(low, low + 2**bits, (n, k), generator=generator, dtype=torch.int32)
        assert torch.equal(unpack(pack(codes, bits), bits, k), codes)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_groups_by_unit_and_back(group_size: int) -> None:
    for num_groups in (1, 3, 8):
        values = torch.randn(5, num_groups)
        units = by_unit(values, group_size)
        assert units.shape == (-(-num_groups * group_size // UNIT), 5, UNIT // group_size)
        assert torch.equal(by_group(units, num_groups), values)
        assert int(units.count_nonzero()) == values.numel()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 6),
    groups=st.integers(1, 5),
    group_size=st.sampled_from([32, 64, 128]),
    bits_asymmetric=st.sampled_from([(4, False), (4, True), (8, False)]),
    scale_dtype=st.sampled_from(SCALES),
    offset=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_a_value_is_off_by_half_a_scale_at_most(
    seed: int,
    n: int,
    groups: int,
    group_size: int,
    bits_asymmetric: tuple[int, bool],
    scale_dtype: torch.dtype,
    offset: float,
) -> None:
    weight = random_tensors(seed)(n, groups * group_size) + offset
    weight[0, :group_size] = 0
    bits, asymmetric = bits_asymmetric
    made = reference.quantise(weight, bits, group_size, asymmetric, scale_dtype)
    values = reference.dequantise(made, torch.float64)
    scales = by_group(made.scales, groups).to(torch.float64).repeat_interleave(group_size, 1)
    # Half a scale, and float32's rounding of what was divided by it.
    assert bool(((values - weight).abs() <= scales * 0.5 + weight.abs() * 2**-22).all())
    assert not values[0, :group_size].any()
    assert made.scales.dtype is scale_dtype


def test_constant_groups_are_exact_to_their_scale() -> None:
    """All of one sign: the range of an asymmetric group still holds zero."""
    weight = torch.cat([torch.full((2, 32), 5.0), torch.full((2, 32), -5.0)], 1)
    for asymmetric in (False, True):
        made = reference.quantise(weight, 4, 32, asymmetric, torch.float32)
        assert torch.allclose(reference.dequantise(made), weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 3}, "bits"),
        ({"group_size": 16}, "group_size"),
        ({"num_inputs": 120}, "group_size"),
        ({"num_inputs": 384}, "packed"),
        ({"bits": 8}, "packed"),
        ({"scales": torch.ones(2, 8, 2)}, "scales"),
        ({"scales": torch.ones(2, 8, 4, dtype=torch.float64)}, "scales"),
        ({"scales": torch.ones(2, 4, 8).transpose(1, 2)}, "scales"),
        ({"zeros": torch.ones(2, 8, 4)}, "zeros"),
        ({"zeros": torch.ones(2, 8, 1, dtype=torch.uint8)}, "zeros"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: dict[str, object], named: str) -> None:
    weight = reference.quantise(torch.randn(8, 256), 4, 32)
    with pytest.raises(ValueError, match=rf"^weight\.{named}:"):
        replace(weight, **change).check()


@pytest.mark.parametrize("group_size", [0, 3, 16, 100])
def test_group_sizes_that_the_layout_lacks(group_size: int) -> None:
    with pytest.raises(ValueError, match="group_size"):
        reference.quantise(torch.randn(4, 96), 4, group_size)


@settings(max_examples=60)
@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 40000),
    k=st.integers(1, 30000),
    chip=st.sampled_from([*CHIPS.values(), INTERPRETER]),
    batch_invariant=st.booleans(),
)
def test_splits_cover_every_unit_once(
    m: int, n: int, k: int, chip: Chip, batch_invariant: bool
) -> None:
    tile = tile_for(m, chip, batch_invariant)
    split, units = split_for(tile, n, k, chip), -(-k // UNIT)
    assert (split.num_splits - 1) * split.units_per_split < units
    assert split.num_splits * split.units_per_split >= units
    assert tile.max_m >= m
    if batch_invariant:
        assert tile_for(1, chip, True) == tile
    else:
        other = min(tile.max_m, 2 * m)
        assert split_for(tile_for(other, chip, False), n, k, chip) == split


def test_llama_shapes_fill_the_chip() -> None:
    """At least two programs per multiprocessor, or splits as short as they get."""
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672)):
        for m in (1, 16):
            tile = tile_for(m, CHIPS["H200"], False)
            split = split_for(tile, n, k, CHIPS["H200"])
            num_warps = -(-n // tile.block_n) * split.num_splits * tile.num_warps
            assert num_warps >= 132 * 7, (n, k, m)


def test_tiles_are_sound() -> None:
    for tile in (*FIXED.values(), *CANDIDATES, *(tile for some in TILES.values() for tile in some)):
        # A warp takes 16 rows of weights at least, and no program holds more than fits.
        assert tile.block_n >= 16 * tile.num_warps
        assert tile.num_stages * (tile.block_n * 64 + tile.block_m * 256) <= 163 * 1024
    for some in TILES.values():
        assert [tile.max_m for tile in some] == sorted(tile.max_m for tile in some)
        assert all(tile.block_m >= 8 for tile in some)
