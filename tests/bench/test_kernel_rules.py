"""Each rule of compiled code holds for what keeps it and fails for what breaks it."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_bench import compiled, norm_case

from kvferry.bench.kernel_rules import case_violations, launch_violations
from kvferry.kernels.chips import CHIPS

H100 = CHIPS["H100"]
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma")


def test_spills_break_a_rule_unless_allowed() -> None:
    assert launch_violations(norm_case(), H100, compiled()) == []
    (broken,) = launch_violations(norm_case(), H100, compiled(spills=8))
    assert "spills 8" in broken
    assert launch_violations(norm_case(spills_allowed=8), H100, compiled(spills=8)) == []


def test_code_that_writes_nothing_breaks_a_rule() -> None:
    """An empty kernel is fast, spills nothing and needs no shared memory."""
    (broken,) = launch_violations(norm_case(), H100, compiled(writes=False))
    assert "writes nothing" in broken


def test_shared_memory_is_held_to_the_chips_limit() -> None:
    limit = H100.shared_limit
    assert launch_violations(norm_case(), H100, compiled(shared=limit)) == []
    (broken,) = launch_violations(norm_case(), H100, compiled(shared=limit + 1))
    assert f"{limit + 1} bytes, H100 has {limit}" in broken
    assert launch_violations(norm_case(), CHIPS["RTX 5060"], compiled(shared=limit))


def test_both_are_named_when_both_are_broken() -> None:
    assert len(launch_violations(norm_case(), H100, compiled(spills=1, shared=1 << 20))) == 2


@pytest.mark.parametrize("chip", ["A100", "H100", "B200", "RTX 5060"])
def test_small_tiles_may_use_any_matrix_instruction_but_must_use_one(chip: str) -> None:
    case = norm_case(matrix=True)
    for name in INSTRUCTIONS:
        assert case_violations(case, CHIPS[chip], [compiled(matrix_instructions={name: 1})]) == []
    (broken,) = case_violations(case, CHIPS[chip], [compiled()])
    assert broken == "expected a matrix instruction, found none"


@pytest.mark.parametrize(
    ("chip", "right"),
    [
        ("A100", "mma.sync"),
        ("H100", "wgmma"),
        ("H200", "wgmma"),
        ("B200", "tcgen05.mma"),
        ("RTX 5060", "mma.sync"),
    ],
)
def test_large_tiles_must_use_the_instruction_of_their_generation(chip: str, right: str) -> None:
    case = norm_case(matrix=True, warp_group=True)
    for name in INSTRUCTIONS:
        broken = case_violations(case, CHIPS[chip], [compiled(matrix_instructions={name: 4})])
        assert bool(broken) == (name != right)
        assert all(f"expected {right}, found {name}" in phrase for phrase in broken)


def test_one_launch_with_the_instruction_is_enough() -> None:
    """A merge after attention has no products of its own."""
    case = norm_case(matrix=True, warp_group=True)
    launches = [compiled(matrix_instructions={"wgmma": 8}), compiled()]
    assert case_violations(case, H100, launches) == []


def test_a_case_without_products_expects_none() -> None:
    plain: dict[str, Any] = {"matrix_instructions": {}}
    assert case_violations(norm_case(), H100, [compiled(**plain)]) == []
