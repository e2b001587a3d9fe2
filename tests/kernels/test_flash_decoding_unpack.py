"""The instructions that unpack a quantised cache on a GPU, followed one by one: the interpreter
runs others.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import triton.language as tl
from numpy.typing import NDArray

from kvferry.kernels.flash_decoding.unpack import E4M3_ASM, E4M3_BITS_ASM, INT8_ASM

Words = NDArray[np.uint32]
BYTES = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), (4, 64)), axis=1)
WORDS: Words = np.ascontiguousarray(BYTES.T).view(np.uint32).ravel()
"""Every byte in each of the four places, among others."""


def permuted(a: Words, b: Words, selector: Words) -> Words:
    both = np.stack([a, b], axis=1).view(np.uint8)
    places = [int(selector[0]) >> 4 * i & 0xF for i in range(4)]
    assert max(places) < 8, "copies of a sign bit"
    return np.ascontiguousarray(both[:, places]).view(np.uint32).ravel()


def looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    out = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def e4m3(halfword: Words) -> Words:
    low = np.ascontiguousarray(halfword.astype(np.uint16)).view(np.uint8)
    values = torch.from_numpy(low).view(torch.float8_e4m3fn).half().numpy()
    return values.view(np.uint32)


def followed(asm: str) -> NDArray[np.float16]:
    """The float16 that a block of PTX makes of WORDS, [n, 4]."""
    registers = {"$2": WORDS}

    def value(name: str) -> Words:
        is_number = name[0].isdigit()
        return np.full_like(WORDS, int(name, 0)) if is_number else registers[name]

    for line in asm.strip().strip("{}").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, rest = line.strip().split(" ", 1)
        names = re.findall(r"[$\w]+", rest)
        if operation == "mov.b32" and "{" in rest:
            low, high, source = names
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
            continue
        inputs = [value(name) for name in names[1:]]
        # What is an output only must not be read before it is written: the compiler may give it
        # any register, but none of an input (&).
        match operation:
            case "mov.b32":
                out = inputs[0]
            case "xor.b32":
                out = inputs[0] ^ inputs[1]
            case "and.b32":
                out = inputs[0] & inputs[1]
            case "shr.b32":
                out = inputs[0] >> inputs[1]
            case "prmt.b32":
                out = permuted(*inputs)
            case "lop3.b32":
                out = looked_up(*inputs)
            case "sub.rn.f16x2":
                out = (inputs[0].view(np.float16) - inputs[1].view(np.float16)).view(np.uint32)
            case "mul.rn.f16x2":
                out = (inputs[0].view(np.float16) * inputs[1].view(np.float16)).view(np.uint32)
            case "cvt.rn.f16x2.e4m3x2":
                out = e4m3(inputs[0])
            case _:
                raise AssertionError(f"what is {operation}?")
        registers[names[0]] = out
    return np.stack([registers["$0"], registers["$1"]], axis=1).view(np.float16)


@pytest.mark.parametrize(
    ("asm", "dtype"),
    [
        pytest.param(INT8_ASM, torch.int8, id="int8"),
        pytest.param(E4M3_ASM, torch.float8_e4m3fn, id="FP8"),
        pytest.param(E4M3_BITS_ASM, torch.float8_e4m3fn, id="FP8 by bits"),
    ],
)
def test_four_elements_become_four_numbers(asm: tl.constexpr, dtype: torch.dtype) -> None:
    expected = torch.from_numpy(WORDS.view(np.uint8)).view(dtype).half().numpy().reshape(-1, 4)
    # The codes of NaN may become any number: it is the scale that is NaN then.
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(followed(asm.value)[known], expected[known])
    assert known.mean() > 0.99
