"""What a layer of the cache refuses, and what quantisation promises."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_data import random_tensors
from sparse_memory import sparse

from kvferry.kernels.chips import CHIPS
from kvferry.kernels.kv_layer import (
    FLOAT_TYPES,
    LEAST_SCALE,
    QUANTISED_TYPES,
    CacheKind,
    KvLayer,
    dequantised,
    kind_of,
    quantised,
)

torch.set_num_threads(1)

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SEEDS = st.integers(0, 2**32 - 1)
TYPES = st.sampled_from(QUANTISED_TYPES)


def layer(dtype: torch.dtype = torch.bfloat16) -> KvLayer:
    k, v = (torch.zeros(3, 4, 2, 8).to(dtype) for _ in range(2))
    if dtype in FLOAT_TYPES:
        return KvLayer(k, v)
    return KvLayer(k, v, torch.zeros(3, 4, 2), torch.zeros(3, 4, 2))


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, *QUANTISED_TYPES])
def test_a_layer_knows_its_shape(dtype: torch.dtype) -> None:
    kv = layer(dtype)
    kv.check()
    assert (kv.block_size, kv.num_kv_heads, kv.head_dim) == (4, 2, 8)
    assert kv.is_quantised == (dtype in QUANTISED_TYPES)


def test_halves_of_one_tensor_are_a_layer() -> None:
    KvLayer(*torch.zeros(3, 2, 4, 2, 8).unbind(1)).check()


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, *QUANTISED_TYPES])
def test_storage_is_the_same_memory(dtype: torch.dtype) -> None:
    kv = layer(dtype)
    for stored, tensor in zip(kv.storage(), (kv.k, kv.v), strict=True):
        assert stored.data_ptr() == tensor.data_ptr()
        assert stored.dtype is (torch.uint8 if dtype is torch.float8_e4m3fn else dtype)


SCALE = torch.zeros(3, 4, 2)
FAR_TOKENS, FAR_HEADS = (16, 2**30, 8, 1), (32, 8, 2**30, 1)
BAD = {
    "kv.k: no kernel reads": (torch.float64, {}),
    "kv.k: must be": (torch.bfloat16, dict.fromkeys(("k", "v"), torch.zeros(3, 4, 8))),
    "kv.k: must be [": (torch.bfloat16, dict.fromkeys(("k", "v"), torch.zeros(3, 4, 8, 2).mT)),
    "kv.k: 2^31 elements lie between": (
        torch.bfloat16,
        dict.fromkeys(("k", "v"), sparse(3, 4, 2, 8, dtype=torch.bfloat16, strides=FAR_TOKENS)),
    ),
    "kv.k: 2^31 elements": (
        torch.bfloat16,
        dict.fromkeys(("k", "v"), sparse(3, 4, 2, 8, dtype=torch.bfloat16, strides=FAR_HEADS)),
    ),
    "kv.v: shape": (torch.bfloat16, {"v": torch.zeros(3, 4, 2, 9, dtype=torch.bfloat16)}),
    "kv.v: shape, strides": (
        torch.float32,
        {"v": torch.zeros(3, 2, 4, 8).transpose(1, 2)},
    ),
    "kv.v: shape, strides or dtype": (torch.float32, {"v": torch.zeros(3, 4, 2, 8).half()}),
    "kv.k_scale: must be given": (torch.int8, {"k_scale": None}),
    "kv.v_scale: must be given": (torch.float8_e4m3fn, {"v_scale": None}),
    "kv.k_scale: must be given for": (torch.float32, {"k_scale": SCALE, "v_scale": SCALE}),
    "kv.k_scale: must be float32": (torch.int8, {"k_scale": SCALE.half()}),
    "kv.v_scale: must be float32": (torch.int8, {"v_scale": torch.zeros(3, 4, 3)}),
    "kv.v_scale: must be float32 (3, 4, 2)": (
        torch.int8,
        {"v_scale": torch.zeros(2, 4, 3).transpose(0, 2)},
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_named(message: str) -> None:
    dtype, changes = BAD[message]
    if dtype is torch.float64:
        kv = KvLayer(*torch.zeros(2, 3, 4, 2, 8, dtype=dtype))
    else:
        kv = replace(layer(dtype), **changes)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        kv.check()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_kinds_by_type_and_chip(chip) -> None:
    assert {kind_of(dtype, chip) for dtype in FLOAT_TYPES} == {CacheKind.FLOAT}
    assert kind_of(torch.int8, chip) == CacheKind.INT8
    fp8 = CacheKind.E4M3_BITS if chip.name == "A100" else CacheKind.E4M3
    assert kind_of(torch.float8_e4m3fn, chip) == fp8


@given(seed=SEEDS, dtype=TYPES, source=st.sampled_from(FLOAT_TYPES))
def test_what_is_read_back_is_within_half_a_step(
    seed: int, dtype: torch.dtype, source: torch.dtype
) -> None:
    """int8: steps of scale. FP8: 3 mantissa bits, below the least normal value steps of 2^-9."""
    x = random_tensors(seed)(3, 2, 40, dtype=source)
    elements, scale = quantised(x, dtype)
    assert scale is not None
    assert elements.dtype is dtype
    assert (scale.dtype, scale.shape) == (torch.float32, (3, 2))
    error = (dequantised(elements, scale) - x.float()).abs()
    step = scale[..., None]
    half = (
        step / 2 if dtype is torch.int8 else torch.maximum(2**-4 * x.float().abs(), 2**-10 * step)
    )
    # Scale, its inverse and both products are rounded to float32.
    assert (error <= half * (1 + 2**-12) + 2**-20 * step).all()


@given(seed=SEEDS, dtype=TYPES)
def test_the_largest_magnitude_of_a_head_is_the_largest_of_the_type(
    seed: int, dtype: torch.dtype
) -> None:
    x = random_tensors(seed)(3, 2, 40)
    elements, scale = quantised(x, dtype)
    at = x.abs().argmax(-1, keepdim=True)
    largest = elements.float().gather(-1, at)
    assert torch.equal(largest, LARGEST[dtype] * x.gather(-1, at).sign())
    assert torch.equal(scale, x.abs().amax(-1) / LARGEST[dtype])


@given(seed=SEEDS, dtype=TYPES, power=st.integers(-60, 60), sign=st.sampled_from([-1.0, 1.0]))
def test_elements_do_not_depend_on_the_unit_of_a_head(
    seed: int, dtype: torch.dtype, power: int, sign: float
) -> None:
    """Powers of two move the scale alone, and other heads not at all."""
    x = random_tensors(seed)(2, 3, 24)
    factors = torch.tensor([1.0, sign * 2.0**power, 1.0])[:, None]
    (one, one_scale), (other, other_scale) = quantised(x, dtype), quantised(x * factors, dtype)
    assert torch.equal(one.float() * factors.sign(), other.float())
    assert torch.equal(one_scale * factors[:, 0].abs(), other_scale)


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
@pytest.mark.parametrize("value", [0.0, 1e-44, 0.9 * LEAST_SCALE])
def test_heads_that_are_zero_or_nearly(dtype: torch.dtype, value: float) -> None:
    elements, scale = quantised(torch.full((1, 2, 16), value), dtype)
    assert not scale.any()
    assert not elements.float().any()
    assert not dequantised(elements, scale).any()


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
def test_the_least_and_the_largest_scale(dtype: torch.dtype) -> None:
    for value in (LARGEST[dtype] * LEAST_SCALE, 3e38):
        elements, scale = quantised(torch.tensor([[value, -value, 0.0]]), dtype)
        assert elements.float().tolist() == [[LARGEST[dtype], -LARGEST[dtype], 0.0]]
        assert math.isclose(float(dequantised(elements, scale)[0, 0]), value, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", QUANTISED_TYPES)
def test_a_nan_is_not_lost(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, 8)
    x[0, 1, 3] = torch.nan
    read = dequantised(*quantised(x, dtype))
    assert read[0, 1].isnan().all()
    assert torch.allclose(read[[0, 1, 1], [0, 0, 1]], torch.ones(3, 8))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_float_types_have_no_scale(dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, 8)
    elements, scale = quantised(x, dtype)
    assert scale is None
    assert torch.equal(elements, x.to(dtype))
    assert torch.equal(dequantised(elements, scale), x.to(dtype).float())


def test_int8_rounds_halves_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]])
    elements, _ = quantised(x, torch.int8)
    assert elements.tolist() == [[127, 0, 2, 0, -2, 126]]
