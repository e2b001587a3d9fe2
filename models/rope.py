"""Rotary position embedding: frequencies fixed at load, cos and sin from absolute positions.

NOTE: keys in the cache are rotated already and are shared between sequences of any length, so the
frequencies must not depend on the length of the sequence of the moment. Two kinds of scaling are
defined that way in the literature; both are fixed here from ``max_model_len``:

* dynamic (NTK): the base that holds for a sequence of exactly ``max_model_len`` tokens;
* longrope: the long factors if ``max_model_len`` exceeds the original length, else the short
  ones.

Frequencies, angles, cos and sin are float32 whatever the compute dtype, as ``transformers`` has
them: the checkpoints were trained with those roundings, and a float64 run agrees with its
reference to the last digits only this way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kvferry.models.rope_spec import RopeSpec, RopeType

TABLE_ROWS = 1024
"""Positions whose cosines are computed at a time on the host."""


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys. Shapes: T tokens, H heads, D = head_dim."""

    inv_freq: Tensor

    def __init__(self, rope: RopeSpec, head_dim: int, max_model_len: int) -> None:
        super().__init__()
        self.scale = cos_sin_scale(rope)
        frequencies = inverse_frequencies(rope, head_dim, max_model_len)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self._tables: dict[torch.dtype, tuple[Tensor, Tensor]] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos, sin [T, D/2] in ``dtype``."""
        if positions.device.type != "cpu" or not len(positions):
            return self._computed(positions, dtype)
        cos, sin = self._table(int(positions.max()) + 1, dtype)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """On the host rows are looked up: computing them wakes torch's threads, which then spin for
        a while beside those that go on with the step. Made in pieces of one size, so that a
        position's bits do not depend on how far the table reaches.
        """
        table = self._tables.get(dtype)
        so_far = 0 if table is None else len(table[0])
        if table is None or so_far < length:
            pieces = [] if table is None else [table]
            for start in range(so_far, length, TABLE_ROWS):
                pieces.append(self._computed(torch.arange(start, start + TABLE_ROWS), dtype))
            cosines, sines = zip(*pieces, strict=True)
            table = self._tables[dtype] = torch.cat(cosines), torch.cat(sines)
        return table

    def _computed(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(torch.float32) * self.inv_freq.to(torch.float32)
        cos = (angles.cos() * self.scale).to(dtype)
        sin = (angles.sin() * self.scale).to(dtype)
        return cos, sin


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_model_len: int) -> Tensor:
    """Radians per position of each rotated pair, float32 [D/2], on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    match rope.type:
        case RopeType.DYNAMIC:
            return 1.0 / (_ntk_base(rope, head_dim, max_model_len) ** exponents)
        case RopeType.LONGROPE:
            factors = (
                rope.long_factor if max_model_len > rope.original_length else rope.short_factor
            )
            return 1.0 / (
                torch.tensor(factors, dtype=torch.float32, device="cpu") * rope.theta**exponents
            )
        case RopeType.YARN:
            return _yarn_frequencies(rope, head_dim, exponents)
        case RopeType.LLAMA3:
            return _llama3_frequencies(rope, 1.0 / (rope.theta**exponents))
        case RopeType.LINEAR:
            return 1.0 / (rope.theta**exponents) / rope.factor
        case RopeType.DEFAULT:
            return 1.0 / (rope.theta**exponents)


def cos_sin_scale(rope: RopeSpec) -> float:
    """What cos and sin are multiplied with: a softmax temperature in yarn and longrope, else 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.type is RopeType.LONGROPE and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    if rope.type is RopeType.YARN:
        if rope.mscale and rope.mscale_all_dim:
            return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(
                rope.factor, rope.mscale_all_dim
            )
        return _yarn_scale(rope.factor, 1.0)
    return 1.0


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _ntk_base(rope: RopeSpec, head_dim: int, max_model_len: int) -> float | Tensor:
    """The NTK-aware base for ``max_model_len`` tokens; rounded to float32 as the reference rounds
    it.
    """
    if max_model_len <= rope.max_position:
        return rope.theta
    length = torch.tensor(max_model_len, device="cpu")
    stretch = rope.factor * length / rope.max_position - (rope.factor - 1)
    return rope.theta * stretch ** (head_dim / (head_dim - 2))


def _llama3_frequencies(rope: RopeSpec, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, those between blended."""
    low_wavelength = rope.original_length / rope.low_freq_factor
    high_wavelength = rope.original_length / rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    kept = (rope.original_length / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept) * inv_freq / rope.factor + kept * inv_freq
    stretched = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, blended)
    return torch.where(wavelength < high_wavelength, inv_freq, stretched)


def _yarn_frequencies(rope: RopeSpec, head_dim: int, exponents: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071): interpolate slow pairs, keep fast ones, a linear ramp between."""

    def pair_turning(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    wavelengths = rope.theta**exponents
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
