"""What several kernels say in Triton: products, element types of the KV cache.

Rule for all kernels: load, convert to float32, compute, convert, store. Arithmetic on bf16 values
is float32 on the chip anyway, and the interpreter keeps bf16 as bare 16-bit words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.kv_layer import LEAST_SCALE, CacheKind

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# How a KV cache stores its elements: the values of CacheKind, for use inside kernels. FP8 is passed
# as uint8.
FLOAT = tl.constexpr(CacheKind.FLOAT.value)
INT8 = tl.constexpr(CacheKind.INT8.value)
E4M3 = tl.constexpr(CacheKind.E4M3.value)
E4M3_BITS = tl.constexpr(CacheKind.E4M3_BITS.value)

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)


@triton.jit
def dot(b_a, b_b, b_acc):
    """acc + a @ b on the matrix units, accumulated in float32. a [M, K], b [K, N].

    float32 goes there as three products of TF32, which keeps 21 of its 24 bits.
    """
    if _INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, acc=b_acc, input_precision="tf32x3")


@triton.jit
def narrow(b_x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, rounded to nearest even. (The interpreter's own cast to bf16 truncates.)"""
    if _INTERPRETED and DTYPE == tl.bfloat16:
        b_bits = b_x.to(tl.uint32, bitcast=True)
        b_rounded = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        b_nan = ((b_bits >> 16) | 0x40).to(tl.uint16)
        return tl.where(b_x == b_x, b_rounded.to(tl.uint16), b_nan).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(DTYPE)


@triton.jit
def e4m3_to_float16(b_bits):
    """uint8 bits of FP8 E4M3 -> the same value in float16, subnormals too (NaN is not kept).

    Sign and magnitude move to float16's places, which divides the value by 2^8, exactly.
    """
    b_wide = b_bits.to(tl.uint16)
    b_half = ((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)
    return (b_half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)


@triton.jit
def cache_to(b_raw, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Elements of a KV cache of some KIND -> DTYPE, before their scale."""
    if KIND == FLOAT:
        return b_raw.to(tl.float32).to(DTYPE) if b_raw.dtype != DTYPE else b_raw
    elif KIND == INT8:
        return b_raw.to(tl.float32).to(DTYPE)
    elif KIND == E4M3:
        return b_raw.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    else:
        return e4m3_to_float16(b_raw).to(tl.float32).to(DTYPE)


@triton.jit
def to_e4m3_bits(b_x):
    """float32 -> uint8 bits of FP8 E4M3, rounded to nearest even, saturating at 448; NaN -> NaN.

    Integer operations and one sum, for chips without the instruction. At or above the least normal
    value 2^-6, 20 bits of float32's mantissa are rounded off and its exponent's bias is moved from
    127 to 7. Below, codes count multiples of 2^-9: so does the mantissa of |x| + 2^14, and that sum
    rounds to nearest even. Either carries into the next exponent as it should.
    """
    b_sign = (b_x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    b_magnitude = tl.minimum(tl.abs(b_x), E4M3_MAX)
    b_bits = b_magnitude.to(tl.uint32, bitcast=True)
    b_normal = ((b_bits + 0x7FFFF + ((b_bits >> 20) & 1)) >> 20) - (120 << 3)
    b_small = (b_magnitude + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    b_code = tl.where(b_magnitude < 0.015625, b_small, b_normal)
    return (b_sign | tl.where(b_x == b_x, b_code, 0x7F)).to(tl.uint8)


@triton.jit
def round_half_even(b_x):
    """float32 -> the nearest whole number, halves to even; |x| < 2^22."""
    # The sum has no bits below 1, and is rounded to nearest even as every sum is.
    return (b_x + 12582912.0) - 12582912.0


@triton.jit
def cache_from(b_x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """float32, already divided by its scale -> elements of a KV cache of some KIND (FP8: uint8).

    NaN as int8 is any number: it is the scale that is NaN then.
    """
    if KIND == FLOAT:
        return narrow(b_x, DTYPE)
    elif KIND == INT8:
        if _INTERPRETED:
            b_x = tl.where(b_x == b_x, b_x, 0.0)
        return round_half_even(tl.clamp(b_x, -INT8_MAX, INT8_MAX)).to(tl.int8)
    elif KIND == E4M3 and not _INTERPRETED:
        b_inside = tl.clamp(b_x, -E4M3_MAX, E4M3_MAX)
        return b_inside.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return to_e4m3_bits(b_x)


@triton.jit
def quantisation_scale(b_largest, KIND: tl.constexpr):
    """Largest magnitudes, float32 -> their scales and the factors to multiply elements with, as
    ``kv_layer.quantised`` has them: both divisions are rounded to nearest.
    """
    b_scale = tl.div_rn(b_largest, INT8_MAX if KIND == INT8 else E4M3_MAX)
    b_is_zero = b_scale < _LEAST_SCALE
    b_inverse = tl.div_rn(1.0, tl.where(b_is_zero, 1.0, b_scale))
    return tl.where(b_is_zero, 0.0, b_scale), tl.where(b_is_zero, 0.0, b_inverse)
