"""Conversions of kernels/language.py in the interpreter, over every code and every halfway point.

torch's own conversions, which round to nearest even, are the reference.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvferry.kernels.kv_layer import LEAST_SCALE, CacheKind
from kvferry.kernels.language import (
    cache_from,
    cache_to,
    dot,
    e4m3_to_float16,
    narrow,
    quantisation_scale,
    round_half_even,
    to_e4m3_bits,
)
from kvferry.kernels.launch import next_power_of_2

torch.set_num_threads(1)

E4M3 = torch.float8_e4m3fn
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
"""All of FP8 E4M3; 0x7F and 0xFF are NaN."""
NUMBERS = CODES[CODES.view(E4M3).float().isfinite()]


@triton.jit
def convert_kernel(p_x, p_out, size, WHAT: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < size, other=0)
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    if WHAT == "narrow":
        b_out = narrow(b_x, DTYPE)
    elif WHAT == "e4m3":
        b_out = to_e4m3_bits(b_x)
    elif WHAT == "half":
        b_out = e4m3_to_float16(b_x)
    elif WHAT == "round":
        b_out = round_half_even(b_x)
    elif WHAT == "read":
        b_out = cache_to(b_x, KIND, DTYPE)
    elif WHAT == "write":
        b_out = cache_from(b_x, KIND, DTYPE)
    elif WHAT == "scale":
        b_out, _ = quantisation_scale(b_x, KIND)
    else:
        _, b_out = quantisation_scale(b_x, KIND)
    tl.store(p_out + o, b_out, mask=o < size)


@triton.jit
def dot_kernel(p_a, p_b, p_c, p_out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    o_m, o_n, o_k = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K)
    b_a = tl.load(p_a + o_m * K + o_k[None, :])
    b_b = tl.load(p_b + o_k[:, None] * N + o_n[None, :])
    b_c = tl.load(p_c + o_m * N + o_n[None, :])
    tl.store(p_out + o_m * N + o_n[None, :], dot(b_a, b_b, b_c))


def converted(
    what: str, x: torch.Tensor, dtype: torch.dtype, kind: CacheKind = CacheKind.FLOAT
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    block = next_power_of_2(x.numel())
    convert_kernel[(1,)](x, out, x.numel(), WHAT=what, KIND=kind.value, BLOCK=block)
    return out


def around(values: torch.Tensor) -> torch.Tensor:
    """Values, the halfway points between neighbours, and the float32 on either side of each."""
    values = values.float().sort().values
    points = torch.cat((values, ((values[1:].double() + values[:-1].double()) / 2).float()))
    infinity = torch.tensor(torch.inf)
    return torch.cat((points, points.nextafter(infinity), points.nextafter(-infinity)))


def same(out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, but for the bits of a NaN."""
    out, expected = out.float(), expected.float()
    bits_equal = torch.equal(
        out.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32)
    )
    return bits_equal and torch.equal(out.isnan(), expected.isnan())


def upper_halves() -> torch.Tensor:
    """float32 for every upper 16 bits, with lower bits at, beside and far from the halfway point;
    no signalling NaNs.
    """
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    bits = torch.where(is_nan, bits | 0x400000, bits)
    return bits.to(torch.int32).view(torch.float32)


def test_narrow_to_bfloat16_rounds_to_nearest_even() -> None:
    x = upper_halves()
    assert same(converted("narrow", x, torch.bfloat16), x.to(torch.bfloat16))


def test_narrow_to_float16_rounds_to_nearest_even() -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = around(halves[halves.isfinite()])
    x = x[x.abs() < 65520]
    assert same(converted("narrow", x, torch.float16), x.to(torch.float16))


def test_narrow_to_float32_changes_nothing() -> None:
    x = torch.randn(64)
    assert torch.equal(converted("narrow", x, torch.float32), x)


def test_e4m3_codes_are_their_own_nearest() -> None:
    values = NUMBERS.view(E4M3).float()
    assert torch.equal(converted("e4m3", values, torch.uint8), NUMBERS)


def test_e4m3_rounds_every_halfway_point_to_even() -> None:
    x = around(NUMBERS.view(E4M3))
    # 448 is the largest; torch has no saturation and makes NaN of what is far above.
    expected = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(converted("e4m3", x, torch.uint8), expected)


def test_e4m3_of_every_magnitude() -> None:
    """Subnormals of both types, saturation, infinities, NaN."""
    x = upper_halves()
    expected = x.clamp(-448, 448).to(E4M3)
    assert same(converted("e4m3", x, torch.uint8).view(E4M3), expected)
    signs = converted("e4m3", x, torch.uint8) >> 7
    assert torch.equal(signs.bool(), x.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [CacheKind.E4M3, CacheKind.E4M3_BITS])
def test_every_e4m3_code_is_read_exactly(kind: CacheKind, dtype: torch.dtype) -> None:
    assert same(converted("read", NUMBERS, dtype, kind), NUMBERS.view(E4M3).to(dtype))


def test_every_e4m3_code_as_float16() -> None:
    assert same(converted("half", NUMBERS, torch.float16), NUMBERS.view(E4M3).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_int8_is_read_exactly(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int8)
    assert same(converted("read", codes, dtype, CacheKind.INT8), codes.to(dtype))


@pytest.mark.parametrize("kind", [CacheKind.E4M3, CacheKind.E4M3_BITS])
def test_a_cache_of_e4m3_saturates(kind: CacheKind) -> None:
    x = torch.cat((around(NUMBERS.view(E4M3)), torch.tensor([448.0, 449, 1e30, -1e30])))
    expected = x.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(converted("write", x, torch.uint8, kind), expected)


def test_a_cache_of_int8_rounds_halves_to_even_and_saturates() -> None:
    x = torch.cat((around(torch.arange(-130, 131)), torch.tensor([1e30, -1e30, 0.1, -0.1])))
    expected = x.clamp(-127, 127).round().to(torch.int8)
    assert torch.equal(converted("write", x, torch.int8, CacheKind.INT8), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cache_of_floats_is_narrowed(dtype: torch.dtype) -> None:
    x = torch.randn(1000)
    assert same(converted("write", x, dtype, CacheKind.FLOAT), x.to(dtype))


def test_whole_numbers_of_every_size_that_is_promised() -> None:
    x = torch.cat((around(torch.arange(-300, 300)), torch.linspace(-(2.0**22), 2.0**22, 4097)))
    assert torch.equal(converted("round", x, torch.float32), x.round())


@pytest.mark.parametrize("kind", [CacheKind.INT8, CacheKind.E4M3, CacheKind.E4M3_BITS])
def test_scales_are_those_of_two_rounded_divisions(kind: CacheKind) -> None:
    most = 127.0 if kind is CacheKind.INT8 else 448.0
    edge = torch.tensor(most * LEAST_SCALE)
    magnitudes = torch.cat((torch.randn(500).abs(), torch.rand(500) * 1e30, edge[None]))
    scale = magnitudes / most
    assert torch.equal(converted("scale", magnitudes, torch.float32, kind), scale)
    assert torch.equal(converted("inverse", magnitudes, torch.float32, kind), 1 / scale)
    tiny = torch.stack((torch.tensor(0.0), torch.tensor(1e-44), edge * 0.99))
    assert not converted("scale", tiny, torch.float32, kind).any()
    assert not converted("inverse", tiny, torch.float32, kind).any()
    nan = torch.tensor([torch.nan])
    assert converted("scale", nan, torch.float32, kind).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    a, b, c = torch.randn(16, 64).to(dtype), torch.randn(64, 32).to(dtype), torch.randn(16, 32)
    out = torch.empty(16, 32)
    dot_kernel[(1,)](a, b, c, out, M=16, N=32, K=64)
    # 64 products, each added with one rounding of float32.
    torch.testing.assert_close(
        out.double(), c.double() + a.double() @ b.double(), rtol=0, atol=2e-5
    )
