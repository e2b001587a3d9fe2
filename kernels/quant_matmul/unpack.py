"""Codes in 16-bit words -> bf16 or fp16, one device function per format."""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import narrow

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.constexpr_function
def _ptx_4(shift, is_bf16):
    magic, one, kind = (0x4300, 0x3F80, "bf16x2") if is_bf16 else (0x6400, 0x3C00, "f16x2")
    return f"""{{
        .reg .b32 field, one;
        shr.b32 field, $1, {shift};
        lop3.b32 field, field, 0x000F000F, {magic * 0x10001:#x}, 0xEA;
        mov.b32 one, {one * 0x10001:#x};
        fma.rn.{kind} $0, field, one, $2;
    }}"""


@triton.constexpr_function
def _ptx_8(shift, is_bf16):
    magic, one, kind = (0x4300, 0x3F80, "bf16x2") if is_bf16 else (0x6400, 0x3C00, "f16x2")
    return f"""{{
        .reg .b32 low, sign, one;
        shr.b32 low, $1, {shift};
        and.b32 sign, low, 0x00800080;
        lop3.b32 low, low, 0x007F007F, {magic * 0x10001:#x}, 0xEA;
        or.b32 sign, sign, {(magic | 0x8000) * 0x10001:#x};
        mov.b32 one, {one * 0x10001:#x};
        fma.rn.{kind} $0, low, one, sign;
    }}"""


@triton.jit
def unpack_4(b_words, SHIFT: tl.constexpr, b_zero, DTYPE: tl.constexpr):
    if _INTERPRETED:
        return narrow(((b_words >> SHIFT) & 0xF).to(tl.float32) - b_zero.to(tl.float32), DTYPE)
    else:
        b_words, b_minus = tl.broadcast(
            b_words, b_zero | (-0x3D00 if DTYPE == tl.bfloat16 else -0x1C00)
        )
        return tl.inline_asm_elementwise(
            _ptx_4(SHIFT, DTYPE == tl.bfloat16),
            "=r,r,r",
            [b_words, b_minus.to(tl.int16)],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        ).to(DTYPE, bitcast=True)


@triton.jit
def unpack_8(b_words, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    if _INTERPRETED:
        return narrow((b_words << (8 - SHIFT) >> 8).to(tl.float32), DTYPE)
    else:
        return tl.inline_asm_elementwise(
            _ptx_8(SHIFT, DTYPE == tl.bfloat16),
            "=r,r",
            [b_words],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        ).to(DTYPE, bitcast=True)
