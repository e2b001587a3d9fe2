"""The instructions that unpack codes on a GPU, followed one by one: the interpreter runs others."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from kvferry.kernels.quant_matmul.unpack import ptx_4, ptx_8

TYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}
ALL = torch.arange(1 << 16)
NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|\d+")


def halves(registers: torch.Tensor, kind: str) -> torch.Tensor:
    """32-bit registers, int64 [n] -> their two numbers, low half first, as float64 [n, 2]."""
    bits = torch.stack((registers & 0xFFFF, registers >> 16), dim=-1)
    signed = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)
    return signed.view(TYPES[kind]).double()


def joined(numbers: torch.Tensor, kind: str) -> torch.Tensor:
    """The reverse; rounds to nearest even as the instructions do."""
    bits = numbers.to(TYPES[kind]).view(torch.int16).to(torch.int64) & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def lop3(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """Bit i of the table is the result for the bits a, b, c that spell i."""
    out = torch.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            chosen = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            out |= chosen[0] & chosen[1] & chosen[2]
    return out & 0xFFFFFFFF


def run(ptx: str, *operands: torch.Tensor) -> torch.Tensor:
    """$0 of a block of PTX; operands $1 ... are 32-bit registers, int64 [n] each."""
    registers = {f"${i + 1}": operand for i, operand in enumerate(operands)}

    def value(name: str) -> torch.Tensor:
        is_number = NUMBER.fullmatch(name) is not None
        return torch.full_like(operands[0], int(name, 0)) if is_number else registers[name]

    for name, target, rest in instructions(ptx):
        inputs = [value(operand) for operand in rest]
        assert all(int(x.min()) >= 0 and int(x.max()) < 1 << 32 for x in inputs)
        match name.split("."):
            case ["mov", "b32"]:
                registers[target] = inputs[0]
            case ["shr", "b32"]:
                registers[target] = inputs[0] >> inputs[1]
            case ["lop3", "b32"]:
                registers[target] = lop3(*inputs[:3], int(inputs[3][0]))
            case ["fma", "rn", kind]:
                a, b, c = (halves(x, kind) for x in inputs)
                registers[target] = joined(a * b + c, kind)
            case _:
                raise AssertionError(f"{name} is not known here")
    return registers["$0"]


def instructions(ptx: str) -> Iterator[tuple[str, str, list[str]]]:
    """Name, target and inputs; every register but operands is declared."""
    declared: set[str] = set()
    for statement in re.split(r"[;{}\n]+", ptx):
        name, _, rest = statement.strip().partition(" ")
        operands = [part.strip() for part in rest.split(",")]
        if name == ".reg":
            declared |= {operands[0].removeprefix(".b32 "), *operands[1:]}
        elif name:
            names = {o for o in operands if not o.startswith("$") and not NUMBER.fullmatch(o)}
            assert names <= declared
            yield name, operands[0], operands[1:]


def both(words: torch.Tensor) -> torch.Tensor:
    """Registers that hold each word beside another one, which must not reach into it."""
    return words | words.flip(0) << 16


def assert_values(out: torch.Tensor, wanted: torch.Tensor, kind: str) -> None:
    numbers = halves(out, kind)
    assert torch.equal(numbers[:, 0], wanted.double())
    assert torch.equal(numbers[:, 1], wanted.flip(0).double())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shift", [0, 4, 8, 12])
def test_codes_of_4_bits_lose_8(shift: int, kind: str) -> None:
    out = run(ptx_4(shift, kind == "bf16x2", 8), both(ALL))
    assert_values(out, (ALL >> shift & 15) - 8, kind)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shift", [0, 4, 8, 12])
@pytest.mark.parametrize("zero", [0, 7, 15])
def test_codes_of_4_bits_lose_their_zero(shift: int, kind: str, zero: int) -> None:
    """The zero of a word comes in the mantissa of -2^7 or -2^10."""
    least = {"bf16x2": -(2.0**7), "f16x2": -(2.0**10)}[kind]
    zeros = torch.full((len(ALL), 2), least - zero, dtype=torch.float64)
    out = run(ptx_4(shift, kind == "bf16x2", None), both(ALL), joined(zeros, kind))
    assert_values(out, (ALL >> shift & 15) - zero, kind)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shift", [0, 8])
def test_codes_of_8_bits_are_signed(shift: int, kind: str) -> None:
    code = ALL >> shift & 255
    out = run(ptx_8(shift, kind == "bf16x2"), both(ALL))
    assert_values(out, torch.where(code >= 128, code - 256, code), kind)
