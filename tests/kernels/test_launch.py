"""A launch as a value: run as often as one likes, or not at all where there is nothing to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.chips import CHIPS, INTERPRETER
from kvferry.kernels.launch import Launch, chip_of, next_power_of_2, require


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


@pytest.mark.gpu
def test_the_chip_of_a_gpu_is_found_by_its_name() -> None:
    chip = chip_of(torch.device("cuda", 0))
    name = torch.cuda.get_device_name(0).upper()
    assert (
        chip.arch
        == 10 * torch.cuda.get_device_capability(0)[0] + (torch.cuda.get_device_capability(0)[1])
    )
    assert chip.name.upper() in name
    assert (chip.name in CHIPS) == any(known in name for known in CHIPS)


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
