"""Codes in 16-bit words -> bf16 or fp16, one device function per format.

A code is put into the mantissa of 2^7 (bf16) or 2^10 (fp16), whose last bit is worth 1: the word is
then the number 2^7 + code, and what remains is to subtract 2^7 + zero, exactly. On the GPU a few
instructions do so for two words at a time; Triton's own operators would take each apart. In the
interpreter the same values come from integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import narrow

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Bits of 2^7 and 1 in bf16, of 2^10 and 1 in fp16, and of their negatives as int16.
_MINUS_BF16 = tl.constexpr(0xC300 - 0x10000)
_MINUS_FP16 = tl.constexpr(0xE400 - 0x10000)


@triton.constexpr_function
def _both(half: int) -> str:
    """The same 16 bits in both halves of a register."""
    return f"0x{half * 0x10001:08x}"


@triton.constexpr_function
def _types(is_bf16: bool) -> tuple[int, str, str]:
    """Bits of the power of two, bits of 1.0 twice, PTX type."""
    return (0x4300, _both(0x3F80), "bf16x2") if is_bf16 else (0x6400, _both(0x3C00), "f16x2")


@triton.constexpr_function
def ptx_4(shift, is_bf16, zero):
    """PTX for $0 = code - 8 of the field at ``shift``, or code + $2 when ``zero`` is None."""
    power, one, kind = _types(is_bf16)
    minus = "$2" if zero is None else _both(0x8000 | power | zero)
    return f"""{{
        .reg .b32 code, one, minus;
        shr.b32 code, $1, {shift};
        lop3.b32 code, code, 0x000F000F, {_both(power)}, 0xEA;
        mov.b32 one, {one};
        mov.b32 minus, {minus};
        fma.rn.{kind} $0, code, one, minus;
    }}"""


@triton.constexpr_function
def ptx_8(shift, is_bf16):
    """PTX for $0 = (code & 127) - (code & 128): the sign bit is worth -128 and adds 2^7 to 2^7, or
    to 2^10, when it is or-ed into it.
    """
    power, one, kind = _types(is_bf16)
    return f"""{{
        .reg .b32 low, sign, one;
        shr.b32 low, $1, {shift};
        lop3.b32 sign, low, 0x00800080, {_both(0x8000 | power)}, 0xEA;
        lop3.b32 low, low, 0x007F007F, {_both(power)}, 0xEA;
        mov.b32 one, {one};
        fma.rn.{kind} $0, low, one, sign;
    }}"""


@triton.jit
def unpack_4(b_words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """Bits SHIFT..SHIFT + 3 of int16 words, less 8, as DTYPE."""
    if _INTERPRETED:
        return narrow(((b_words >> SHIFT) & 15).to(tl.float32) - 8.0, DTYPE)
    else:
        PTX: tl.constexpr = ptx_4(SHIFT, DTYPE == tl.bfloat16, 8)
        b_out = tl.inline_asm_elementwise(PTX, "=r,r", [b_words], tl.int16, is_pure=True, pack=2)
        return b_out.to(DTYPE, bitcast=True)


@triton.jit
def unpack_4_zero(b_words, SHIFT: tl.constexpr, b_zero, DTYPE: tl.constexpr):
    """Bits SHIFT..SHIFT + 3 of int16 words, less ``b_zero`` (uint8, 0..15), as DTYPE."""
    if _INTERPRETED:
        b_code = ((b_words >> SHIFT) & 15).to(tl.float32)
        return narrow(b_code - b_zero.to(tl.float32), DTYPE)
    else:
        PTX: tl.constexpr = ptx_4(SHIFT, DTYPE == tl.bfloat16, None)
        MINUS: tl.constexpr = _MINUS_BF16 if DTYPE == tl.bfloat16 else _MINUS_FP16
        b_words, b_minus = tl.broadcast(b_words, b_zero.to(tl.int16) | MINUS)
        b_out = tl.inline_asm_elementwise(
            PTX, "=r,r,r", [b_words, b_minus], tl.int16, is_pure=True, pack=2
        )
        return b_out.to(DTYPE, bitcast=True)


@triton.jit
def unpack_8(b_words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """Bits SHIFT..SHIFT + 7 of int16 words, two's complement, as DTYPE."""
    if _INTERPRETED:
        return narrow((b_words << (8 - SHIFT) >> 8).to(tl.float32), DTYPE)
    else:
        PTX: tl.constexpr = ptx_8(SHIFT, DTYPE == tl.bfloat16)
        b_out = tl.inline_asm_elementwise(PTX, "=r,r", [b_words], tl.int16, is_pure=True, pack=2)
        return b_out.to(DTYPE, bitcast=True)
