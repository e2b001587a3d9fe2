"""Quantised weights as kernels read them.

Shapes: N output features, K input features, G group size, U = ceil(K / 128) units.

Codes are kept in units of 128 inputs, all rows of a unit together: ``packed[u, n]`` is 64 bytes
(4 bit) or 128 bytes (8 bit) that hold row n's codes of inputs 128 u .. 128 u + 127, and the rows of
a tile are one contiguous piece of memory. A unit is cut into 4 slices of 32 inputs. A word of 16
bits holds the codes of 4 (4 bit) or 2 (8 bit) slices at the same place j within the slice:

    4 bit: word j      of 32, bits 4 s .. 4 s + 3:               input 128 u + 32 s + j
    8 bit: word 32 h + j of 64, bits 8 i .. 8 i + 7, s = 2 h + i: input 128 u + 32 s + j

So one shift and one mask turn a tile of words into a tile of 32 consecutive inputs, in the very
places where the matrix instruction wants them, and a group of 32, 64 or 128 inputs is 1, 2 or 4
slices. Inputs beyond K have code 0, groups beyond K scale 0. Scales and zeros are kept in the same
way, all rows of a unit together, 128 / G per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

UNIT = 128
"""Inputs per unit."""
SLICE = 32
"""Inputs per slice, and words per run of words."""
GROUP_SIZES = (32, 64, 128)
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantWeight:
    """A weight of N x K.

    Value of an element of group g, the (g % (128 / G))-th of unit g // (128 / G):
    ``scale[n, g] * (code[n, k] - zero[n, g])``.
    """

    packed: torch.Tensor
    """int16 [U, N, 8 * bits]: see the head of this module. 4 bit codes are 0..15; 8 bit codes are
    two's complement."""
    scales: torch.Tensor
    """[U, N, 128 / G], of one of SCALE_TYPES."""
    zeros: torch.Tensor | None
    """uint8 [U, N, 128 / G], 0..15; None: symmetric, zero is 8 for 4 bit and 0 for 8 bit."""
    bits: int
    """4 or 8."""
    group_size: int
    """G, one of GROUP_SIZES; divides K."""
    num_inputs: int
    """K."""

    @property
    def num_outputs(self) -> int:
        return self.packed.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.packed.nbytes + self.scales.nbytes + zeros

    def check(self) -> None:
        """Raise ValueError naming the part that does not fit."""
        n, k = self.packed.shape[-2], self.num_inputs
        if self.bits not in (4, 8):
            raise ValueError(f"weight.bits: {self.bits}; 4 and 8 are possible")
        if self.group_size not in GROUP_SIZES or k % self.group_size or k <= 0:
            raise ValueError(f"weight.group_size: {self.group_size} for {k} inputs")
        units = (-(-k // UNIT), n, 8 * self.bits)
        if self.packed.shape != units or self.packed.dtype is not torch.int16:
            raise ValueError(f"weight.packed: must be int16 {units}")
        groups = (-(-k // UNIT), n, UNIT // self.group_size)
        if self.scales.shape != groups or self.scales.dtype not in SCALE_TYPES:
            raise ValueError(f"weight.scales: must be {groups} of a float type")
        if self.zeros is not None and (
            self.bits != 4 or self.zeros.shape != groups or self.zeros.dtype is not torch.uint8
        ):
            raise ValueError(f"weight.zeros: must be uint8 {groups}, with 4 bit codes")
        for name, part in (("packed", self.packed), ("scales", self.scales), ("zeros", self.zeros)):
            if part is not None and not part.is_contiguous():
                raise ValueError(f"weight.{name}: must be contiguous")


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Integer codes [N, K] -> int16 [U, N, 8 * bits]; only the low ``bits`` bits count."""
    n, k = codes.shape
    num_units, per_word = -(-k // UNIT), 16 // bits
    padded = codes.new_zeros(n, num_units * UNIT, dtype=torch.int32)
    padded[:, :k] = codes.to(torch.int32) & ((1 << bits) - 1)
    fields = padded.view(n, num_units, 4 // per_word, per_word, SLICE)
    shifts = torch.arange(0, 16, bits, device=codes.device, dtype=torch.int32)
    words = (fields << shifts[:, None]).sum(3, dtype=torch.int32)
    # Words above 2^15 are the negative ones of int16.
    words = torch.where(words >= 1 << 15, words - (1 << 16), words)
    return words.to(torch.int16).view(n, num_units, 8 * bits).transpose(0, 1).contiguous()


def unpack(packed: torch.Tensor, bits: int, num_inputs: int) -> torch.Tensor:
    """The codes [N, K] as int32: 0..15 for 4 bit, -128..127 for 8 bit."""
    num_units, n, _ = packed.shape
    words = packed.to(torch.int32).transpose(0, 1).reshape(n, num_units, bits // 4, 1, SLICE)
    shifts = torch.arange(0, 16, bits, device=packed.device, dtype=torch.int32)
    codes = (words >> shifts[:, None]) & ((1 << bits) - 1)
    if bits == 8:
        codes = torch.where(codes >= 128, codes - 256, codes)
    return codes.reshape(n, num_units * UNIT)[:, :num_inputs].contiguous()


def by_unit(values: torch.Tensor, group_size: int) -> torch.Tensor:
    """Scales or zeros [N, K / G], as checkpoints have them -> [U, N, 128 / G], 0 beyond K."""
    n, num_groups = values.shape
    per_unit = UNIT // group_size
    num_units = -(-num_groups // per_unit)
    padded = values.new_zeros(n, num_units * per_unit)
    padded[:, :num_groups] = values
    return padded.view(n, num_units, per_unit).transpose(0, 1).contiguous()


def by_group(values: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Scales or zeros [U, N, 128 / G] -> [N, K / G]."""
    return values.transpose(0, 1).flatten(1)[:, :num_groups]
