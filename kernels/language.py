"""What several kernels say in Triton: products, element types of the KV cache.

Rule for all kernels: load, convert to float32, compute, convert, store. Arithmetic on bf16 values
is float32 on the chip anyway, and the interpreter keeps bf16 as bare 16-bit words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.kv_layer import CacheKind

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# How a KV cache stores its elements: the values of CacheKind, for use inside kernels. FP8 is passed
# as uint8.
FLOAT = tl.constexpr(CacheKind.FLOAT.value)
INT8 = tl.constexpr(CacheKind.INT8.value)
E4M3 = tl.constexpr(CacheKind.E4M3.value)
E4M3_BITS = tl.constexpr(CacheKind.E4M3_BITS.value)

E4M3_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)


@triton.jit
def dot(b_a, b_b, b_acc):
    """acc + a @ b on the matrix units, accumulated in float32. a [M, K], b [K, N]."""
    if _INTERPRETED:
        return tl.dot(b_a.to(tl.float32), b_b.to(tl.float32), acc=b_acc, input_precision="ieee")
    else:
        return tl.dot(b_a, b_b, acc=b_acc)


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
