"""Norms and gated units of the CPU against their references in float64."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels.cpu import rows
from kvferry.kernels.cpu.library import CpuOps, Lanes
from kvferry.kernels.gated.reference import swiglu
from kvferry.kernels.rms_norm.reference import add_rms_norm, rms_norm

SIZES = (1, 15, 16, 17, 48, 576, 1000)
UNIT = 2.0**-23


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 7, 70])
def test_norms(cpu: CpuOps, size: int, count: int, two_threads: None) -> None:
    x, residual, weight = torch.randn(count, size), torch.randn(count, size), torch.randn(size)
    y, total = rows.normed(cpu, x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    wide = total.double()
    expected = weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.allclose(y.double(), expected, rtol=size * UNIT + 4 * UNIT, atol=0)
    alone, same = rows.normed(cpu, x, None, weight, 1e-5)
    assert same.data_ptr() == x.data_ptr()
    assert torch.allclose(alone, rms_norm(x, weight, 1e-5), rtol=1e-4)


def test_norms_of_heads_and_of_strided_rows(cpu: CpuOps) -> None:
    x, weight = torch.randn(5, 3, 64), torch.randn(64)
    y = rows.normed(cpu, x, None, weight, 1e-6)[0]
    assert y.shape == x.shape
    assert torch.equal(y[2, 1:2], rows.normed(cpu, x[2, 1:2], None, weight, 1e-6)[0])
    part = torch.randn(6, 100)[:, 20:84]
    assert torch.equal(
        rows.normed(cpu, part, None, weight, 1e-6)[0],
        rows.normed(cpu, part.contiguous(), None, weight, 1e-6)[0],
    )


@pytest.mark.parametrize("size", SIZES)
def test_gated_units(cpu: CpuOps, size: int, two_threads: None) -> None:
    gate, up = 4 * torch.randn(70, size), torch.randn(70, size)
    y = rows.gated_unit(cpu, gate, up)
    assert torch.allclose(y.double(), swiglu(gate.double(), up.double()), rtol=8 * UNIT, atol=1e-30)


def test_gated_units_of_extreme_gates(cpu: CpuOps) -> None:
    gate = torch.tensor([[-1e30, -200.0, -90.0, -0.0, 0.0, 90.0, 1e30, torch.inf, torch.nan]])
    y = rows.gated_unit(cpu, gate, torch.ones_like(gate))[0]
    assert y[:3].abs().max() < 1e-8
    assert y[3:8].tolist() == gate[0, 3:8].tolist()
    assert y[8].isnan()


def test_both_kinds_of_cpu_give_the_same_bits(cpu: CpuOps, cpu_library: object) -> None:
    other = CpuOps(cpu_library, Lanes.AVX2)  # type: ignore[arg-type]
    x, y = torch.randn(2, 40, 100)
    weight = torch.randn(100)
    assert torch.equal(rows.gated_unit(cpu, x, y), rows.gated_unit(other, x, y))
    for residual in (None, y):
        ours = rows.normed(cpu, x, residual, weight, 1e-5)[0]
        assert torch.equal(ours, rows.normed(other, x, residual, weight, 1e-5)[0])


def test_other_types_and_unit_offsets_are_plain_torchs() -> None:
    x, residual = torch.randn(2, 3, 32).double()
    weight = torch.randn(32).double()
    assert torch.equal(rows.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5))
    ours, theirs = (f(x, residual, weight, 1e-5) for f in (rows.add_rms_norm, add_rms_norm))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(rows.swiglu(x, residual), swiglu(x, residual))
    x, weight = x.float(), weight.float()
    assert torch.equal(rows.rms_norm(x, weight, 1e-5, True), rms_norm(x, weight, 1e-5, True))
