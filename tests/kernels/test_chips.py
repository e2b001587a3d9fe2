"""The table of chips, and floors drawn from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip

FINITE = st.floats(0, 1e15)


@pytest.mark.parametrize("chip", [*CHIPS.values(), INTERPRETER], ids=lambda chip: chip.name)
def test_numbers_are_of_the_right_size(chip: Chip) -> None:
    """Units mixed up are off by a thousand or more."""
    assert 48 * 1024 < chip.shared_limit < 256 * 1024
    assert 1 <= chip.num_sms < 1000
    assert 1 << 20 <= chip.l2_nbytes < 1 << 28
    assert chip.arch in (80, 89, 90, 100, 103, 120)
    # More than one operation and less than a thousand for each byte.
    assert 1 < chip.matmul_flops / chip.bandwidth < 1000


def test_names_are_keys_and_none_hides_in_another() -> None:
    """A device's chip is found by the name that its own name contains."""
    assert all(chip.name == name for name, chip in CHIPS.items())
    assert [(a, b) for a in CHIPS for b in CHIPS if a != b and a in b] == []


def test_the_chips_of_the_rooflines() -> None:
    assert {"H100", "H200", "B200", "RTX 5060"} <= set(CHIPS)
    assert CHIPS["H200"].bandwidth > CHIPS["H100"].bandwidth
    assert {name for name, chip in CHIPS.items() if not chip.has_native_e4m3} == {"A100"}


@given(nbytes=FINITE, flops=FINITE)
def test_a_floor_is_the_larger_of_two_times(nbytes: float, flops: float) -> None:
    chip = CHIPS["H100"]
    floor = chip.floor_seconds(nbytes, flops)
    assert floor >= nbytes / 3.35e12
    assert floor >= flops / 989e12
    assert math.isclose(floor, nbytes / 3.35e12) or math.isclose(floor, flops / 989e12)
