"""Quantised cache elements to float16, four at a time.

A decoding step reads FP8 faster than it can convert it one by one: at 4.8 TB/s an SM of an H200 has
0.05 cycles per byte and scheduler. So four bytes are converted as one 32-bit word, in PTX. The
interpreter has ``cache_to`` instead, which gives the same values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvferry.kernels.language import E4M3, FLOAT, INT8, cache_to

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# Byte b of a signed word becomes the float16 1024 + (b + 128), whose bits are 0x6400 + (b + 128).
INT8_ASM = tl.constexpr("""{
    .reg .b32 x, c;
    mov.b32 c, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x5150;
    prmt.b32 $1, x, 0x64646464, 0x5352;
    sub.rn.f16x2 $0, $0, c;
    sub.rn.f16x2 $1, $1, c;
}""")
E4M3_ASM = tl.constexpr("""{
    .reg .b16 a, b;
    mov.b32 {a, b}, $2;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")
# Sign and magnitude move to float16's places, which divides by 2^8; subnormals are exact too.
E4M3_BITS_ASM = tl.constexpr("""{
    .reg .b32 x, y, m, n, c;
    mov.b32 c, 0x5c005c00;
    prmt.b32 x, $2, 0, 0x1404;
    prmt.b32 y, $2, 0, 0x3424;
    and.b32 m, x, 0x7f007f00;
    and.b32 n, y, 0x7f007f00;
    shr.b32 m, m, 1;
    shr.b32 n, n, 1;
    lop3.b32 $0, x, 0x80008000, m, 0xea;
    lop3.b32 $1, y, 0x80008000, n, 0xea;
    mul.rn.f16x2 $0, $0, c;
    mul.rn.f16x2 $1, $1, c;
}""")


@triton.jit
def unpack(b_raw, KIND: tl.constexpr, DTYPE: tl.constexpr, IN_PLACE: tl.constexpr):
    """Elements of a KV cache of some KIND -> DTYPE (float16 if quantised), before their scale.

    IN_PLACE converts them in the layout they were loaded in. For the transposed operand of a
    product that is faster: 16-bit elements are transposed on their way from shared memory, 8-bit
    ones are fetched one by one. (The compiler moves no impure operation past a change of layout.)
    """
    if KIND == FLOAT or _INTERPRETED:
        return cache_to(b_raw, KIND, DTYPE)
    else:
        ASM: tl.constexpr = (
            INT8_ASM if KIND == INT8 else (E4M3_ASM if KIND == E4M3 else E4M3_BITS_ASM)
        )
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r", [b_raw], dtype=tl.float16, is_pure=not IN_PLACE, pack=4
        )
