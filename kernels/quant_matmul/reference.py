"""Products with weights of 4 or 8 bits, and the quantisation to them, in plain torch.

Shapes: M rows of x, N output features, K input features, G group size. Codes are found by rounding
to nearest: by the largest magnitude of a group (symmetric) or by its least and largest value
(asymmetric, 4 bit only), as checkpoints of AWQ and GPTQ have it, and each value is off by half a
scale at most.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.kernels.quant_matmul.layout import QuantWeight, by_group, by_unit, pack, unpack

ROWS = 4096
"""Of a weight that are turned into float64 at once, which takes twenty times their space."""


def quant_matmul(
    x: torch.Tensor,
    weight: QuantWeight,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x [M, K] times the weight's values [N, K] transposed, plus bias [N] -> [M, N].

    Summed in float64, so right to one rounding to the type of ``x``; ``batch_invariant`` means
    nothing here.
    """
    rows = range(0, weight.num_outputs, ROWS)
    parts = (dequantise(_rows_of(weight, first), torch.float64) for first in rows)
    total = torch.cat([x.to(torch.float64) @ part.T for part in parts], dim=1)
    if bias is not None:
        total = total + bias.to(torch.float64)
    return total.to(x.dtype)


def _rows_of(weight: QuantWeight, first: int) -> QuantWeight:
    rows = slice(first, first + ROWS)
    zeros = None if weight.zeros is None else weight.zeros[:, rows]
    return replace(
        weight, packed=weight.packed[:, rows], scales=weight.scales[:, rows], zeros=zeros
    )


def quantise(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    asymmetric: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> QuantWeight:
    """Weight [N, K] -> codes of 4 or 8 bits with one scale per ``group_size`` inputs of a row.

    A group of zeros has scale 0. Raises ValueError for sizes that the layout does not have.
    """
    n, k = weight.shape
    if group_size <= 0 or k % group_size:
        raise ValueError(f"group_size: {group_size} does not divide {k} inputs")
    groups = weight.to(torch.float32).view(n, k // group_size, group_size)
    largest = 2 ** (bits - 1) - 1
    if asymmetric:
        # Zero is always a code, so that the range holds it.
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        scales = _rounded_up((high - low) / 15, scale_dtype)
        zeros = (-low * _inverse(scales)).round().clamp(0, 15)
        codes = (groups * _inverse(scales)[..., None]).round() + zeros[..., None]
        codes = codes.clamp(0, 15)
    else:
        scales = _rounded_up(groups.abs().amax(-1) / largest, scale_dtype)
        zeros = None
        codes = (groups * _inverse(scales)[..., None]).round().clamp(-largest, largest)
        codes = codes + 8 if bits == 4 else codes
    made = QuantWeight(
        packed=pack(codes.view(n, k).to(torch.int32), bits),
        scales=by_unit(scales.to(scale_dtype), group_size),
        zeros=None if zeros is None else by_unit(zeros.to(torch.uint8), group_size),
        bits=bits,
        group_size=group_size,
        num_inputs=k,
    )
    made.check()
    return made


def dequantise(weight: QuantWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight's values [N, K]."""
    codes = unpack(weight.packed, weight.bits, weight.num_inputs).to(dtype)
    if weight.zeros is None:
        zeros = torch.full_like(codes, 8 if weight.bits == 4 else 0)
    else:
        zeros = _per_input(weight.zeros.to(dtype), weight)
    return _per_input(weight.scales.to(dtype), weight) * (codes - zeros)


def _per_input(values: torch.Tensor, weight: QuantWeight) -> torch.Tensor:
    """Values of groups [U, N, 128 / G] -> of inputs [N, K]."""
    num_groups = weight.num_inputs // weight.group_size
    return by_group(values, num_groups).repeat_interleave(weight.group_size, 1)


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales > 0, 1.0 / scales, 0.0)


def _rounded_up(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least value of ``dtype`` not below each scale: a scale rounded down would cut off the
    group's largest value by more than half a step.
    """
    rounded = scales.to(dtype)
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.to(torch.float32) < scales, up, rounded).to(torch.float32)
