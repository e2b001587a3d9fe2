"""A launch as a value: run as often as one likes, or not at all where there is nothing to do."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.chips import CHIPS, INTERPRETER
from kvferry.kernels.launch import (
    Launch,
    chip_of,
    chip_of_properties,
    next_power_of_2,
    require,
)


@triton.jit
def add_kernel(p_x, p_other, amount, SCALED: tl.constexpr):
    """x[i] += amount (+ other[i]), one element per program; twice the amount where SCALED."""
    i = tl.program_id(0)
    b_x = tl.load(p_x + i) + (2 * amount if SCALED else amount)
    if p_other is not None:
        b_x += tl.load(p_other + i)
    tl.store(p_x + i, b_x)


def launch(x: torch.Tensor, grid: tuple[int, ...], **changes: Any) -> Launch:
    args: dict[str, Any] = {"p_x": x, "p_other": None, "amount": 3}
    return Launch(kernel=add_kernel, grid=grid, args=args | changes, constants={"SCALED": False})


def test_each_run_is_one_launch_of_the_whole_grid() -> None:
    x = torch.zeros(4, dtype=torch.int64)
    value = launch(x, (3,))
    assert x.tolist() == [0, 0, 0, 0]
    value.run()
    assert x.tolist() == [3, 3, 3, 0]
    value.run()
    assert x.tolist() == [6, 6, 6, 0]


def test_arguments_and_constants_arrive() -> None:
    x = torch.zeros(2, dtype=torch.int64)
    value = launch(x, (2,), p_other=torch.tensor([10, 20]), amount=-1)
    dataclasses.replace(value, constants={"SCALED": True}).run()
    assert x.tolist() == [8, 18]


@pytest.mark.parametrize("grid", [(0,), (0, 2), (2, 0, 1)])
def test_an_empty_grid_launches_nothing(grid: tuple[int, ...]) -> None:
    x = torch.zeros(4, dtype=torch.int64)
    launch(x, grid).run()
    assert not x.any()
    # Not even a kernel that could not be launched.
    Launch(kernel=None, grid=grid, args={}, constants={}).run()


def test_a_launch_cannot_be_changed() -> None:
    value = launch(torch.zeros(1), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.grid = (2,)  # type: ignore[misc]


def test_the_cpu_is_the_interpreter() -> None:
    assert chip_of(torch.device("cpu")) is INTERPRETER
    assert chip_of(torch.device("cpu")) is chip_of(torch.empty(1).device)


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_runs_no_kernels_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=rf"run on cuda, not on {device}; TRITON_INTERPRET=1"):
        chip_of(torch.device(device))


def properties(name: str, **changes: int) -> SimpleNamespace:
    """What torch says of an H200, under another name."""
    plain = {
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "shared_memory_per_block_optin": 227 * 1024,
        "L2_cache_size": 60 << 20,
    }
    return SimpleNamespace(name=name, **(plain | changes))


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 5060 Laptop GPU", "RTX 5060"),
    ],
)
def test_a_chip_is_found_by_its_name(name: str, chip: str) -> None:
    found = chip_of_properties(properties(name))
    assert found.name == chip
    assert found.bandwidth == CHIPS[chip].bandwidth
    assert found.matmul_flops == CHIPS[chip].matmul_flops


def test_what_the_driver_reports_is_believed() -> None:
    """A slice of a chip has its name."""
    slice_ = properties("NVIDIA H200 MIG 1g.18gb", multi_processor_count=16, L2_cache_size=7 << 20)
    found = chip_of_properties(slice_)
    assert (found.name, found.num_sms, found.l2_nbytes) == ("H200", 16, 7 << 20)
    assert found.shared_limit == CHIPS["H200"].shared_limit


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA L4", "NVIDIA H20"])
def test_a_chip_that_is_in_no_data_sheet_here_goes_by_its_own_name(name: str) -> None:
    found = chip_of_properties(properties(name, major=8, minor=9))
    assert (found.name, found.arch, found.num_sms) == (name, 89, 132)
    assert math.isnan(found.bandwidth)


@pytest.mark.gpu
def test_the_chip_of_a_gpu_is_that_of_its_properties() -> None:
    chip = chip_of(torch.device("cuda", 0))
    major, minor = torch.cuda.get_device_capability(0)
    assert chip.arch == 10 * major + minor
    assert chip.name.upper() in torch.cuda.get_device_name(0).upper()
    assert 48 * 1024 <= chip.shared_limit < 1 << 20
    assert chip.l2_nbytes >= 1 << 20


@given(n=st.integers(0, 2**40))
def test_the_next_power_of_two(n: int) -> None:
    power = next_power_of_2(n)
    assert power.bit_count() == 1
    assert power >= n
    assert power == 1 or power // 2 < n


def test_what_is_required_is_named() -> None:
    require(True, "x", "must be [T]")
    with pytest.raises(ValueError, match=r"^x: must be \[T\]$"):
        require(False, "x", "must be [T]")
