"""Cases are checked and timed; whatever cannot be is said, and nothing stops the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kernel_bench import CPU, FakeClock, FakeTimer, bench, norm_case, norm_work
from triton.runtime.errors import OutOfResources, PTXASError

from kvferry.bench.kernel_cases.case import Limit, Work
from kvferry.bench.kernel_cases.registry import chosen_cases
from kvferry.bench.kernel_device import (
    OURS,
    PIECE,
    DeviceLimits,
    check,
    measure_device_limits,
    relative_error,
    run_case,
    run_cases,
)
from kvferry.bench.kernel_timing import Call, copies_beyond_l2
from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip

LIMITS = DeviceLimits(copy_bytes_per_s=1e9, matmul_flops_per_s=1e12)


def work(**changes: Any) -> Work:
    return norm_work(32, CPU, INTERPRETER, **changes)


def making(make: Callable[[Work], Work]) -> Callable[[torch.device, Chip], Work]:
    return lambda device, chip: make(norm_work(32, device, chip))


def test_a_right_kernel_is_checked_and_timed() -> None:
    result = run_case(norm_case(), bench(FakeTimer(lambda call: 2e-6)))
    assert result.error is not None
    assert result.error <= 1e-5
    assert not result.is_wrong
    assert result.timings[OURS].seconds == pytest.approx(2e-6)
    assert result.copies == copies_beyond_l2(1 << 20, INTERPRETER.l2_nbytes)
    assert result.notes == []


@pytest.mark.parametrize("limit", Limit)
def test_a_share_is_the_rate_over_the_measured_limit(limit: Limit) -> None:
    case = norm_case(nbytes=1_000_000, flops=10**9, limit=limit)
    result = run_case(case, bench(FakeTimer(lambda call: 2e-3)))
    assert result.share(LIMITS) == pytest.approx(0.5)


def test_a_wrong_result_is_wrong_and_not_timed() -> None:
    def off(right: Work) -> Work:
        return replace(right, expected=lambda: [tensor + 0.1 for tensor in right.expected()])

    result = run_case(norm_case(make=making(off)), bench())
    assert result.is_wrong
    assert result.timings == {}
    assert "wrong: error" in result.notes[0]
    assert result.share(LIMITS) is None


def test_an_output_that_nobody_wrote_is_wrong() -> None:
    result = run_case(norm_case(make=making(lambda w: replace(w, launches=[]))), bench())
    assert result.is_wrong


def test_a_nan_is_wrong() -> None:
    def poisoned(right: Work) -> Work:
        return replace(right, expected=lambda: [t * torch.nan for t in right.expected()])

    assert run_case(norm_case(make=making(poisoned)), bench()).is_wrong


def test_a_reference_that_returns_the_outputs_proves_nothing() -> None:
    right = work()
    aliased = replace(right, expected=lambda: [right.outputs[0][:]])
    with pytest.raises(ValueError, match="what the launches write"):
        check(aliased)


def test_a_reference_with_too_few_outputs_is_refused() -> None:
    with pytest.raises(ValueError, match="0 references of 1"):
        check(work(expected=list))


def test_the_reference_sees_the_inputs_before_the_launches() -> None:
    """For launches may write where they read."""
    order: list[str] = []
    right = work()

    class Recorded:
        def run(self) -> None:
            order.append("launch")

    def expected() -> list[torch.Tensor]:
        order.append("reference")
        return list(right.expected())

    check(replace(right, expected=expected, launches=[Recorded()]))  # type: ignore[list-item]
    assert order == ["reference", "launch"]


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("out of memory\nlong text"), "cannot: out of memory"),
        (OutOfResources(99, 64, "shared memory"), "cannot: out of resource: shared memory, "),
        (PTXASError("internal"), "cannot: PTXAS error: internal"),
        (AssertionError("not on this chip"), "cannot: not on this chip"),
    ],
)
def test_what_a_device_cannot_do_is_a_note(error: Exception, note: str) -> None:
    def broken(device: torch.device, chip: Chip) -> Work:
        raise error

    result = run_case(norm_case(make=broken), bench())
    (found,) = result.notes
    assert found.startswith(note)
    assert "\n" not in found
    assert result.error is None
    assert not result.is_wrong


def test_peers_are_timed_beside_it() -> None:
    fast, slow = lambda: None, lambda: None

    def seconds(call: Call) -> float:
        return {fast: 1e-3, slow: 4e-3}.get(call, 2e-3)

    case = norm_case(make=partial(norm_work, 32, peers={"fast": fast, "slow": slow}))
    result = run_case(case, bench(FakeTimer(seconds)))
    assert list(result.timings) == [OURS, "fast", "slow"]
    assert result.peer_speedup == pytest.approx(0.5)


def test_a_peer_that_fails_is_named_and_the_others_run() -> None:
    def unsupported() -> None:
        raise RuntimeError("no kernel for this")

    peers = {"bad": unsupported, "good": lambda: None}
    result = run_case(norm_case(make=partial(norm_work, 32, peers=peers)), bench())
    assert result.notes == ["bad cannot: no kernel for this"]
    assert set(result.timings) == {OURS, "good"}


def test_all_calls_of_a_round_read_one_table() -> None:
    """150 tables of 1 GB, one per call of a round on an H200, would not fit on it."""
    case = next(case for case in chosen_cases("embedding") if case.name.startswith("64 x"))
    meta, chip = torch.device("meta"), CHIPS["H200"]
    assert copies_beyond_l2(case.nbytes, chip.l2_nbytes) > 100
    first, second = (case.make(meta, chip).launches[0].args for _ in range(2))
    assert first["p_weight"] is second["p_weight"]
    assert first["p_ids"] is not second["p_ids"]


def test_without_peers_there_is_no_speedup() -> None:
    assert run_case(norm_case(), bench()).peer_speedup is None


def test_cases_with_goals_go_first_and_the_rest_is_said_to_be_skipped() -> None:
    made: list[str] = []

    def noting(name: str, device: torch.device, chip: Chip) -> Work:
        made.append(name)
        return norm_work(32, device, chip)

    goals: dict[str, dict[str, Any]] = {
        "plain": {},
        "share": {"goal": 0.5},
        "peer": {"peer_goal": 1.0},
        "other": {"not_slower_than": "plain"},
        "late": {},
    }
    cases = [
        norm_case(name, make=partial(noting, name), nbytes=1 << 30, **goal)
        for name, goal in goals.items()
    ]
    results = run_cases(cases, bench(clock=FakeClock(step=1.0)), deadline=4.5)
    assert [result.case.name for result in results] == list(goals)
    assert list(dict.fromkeys(made)) == ["share", "peer", "other", "plain"]
    assert results[-1].notes == ["skipped: out of time"]


def test_a_case_is_named_before_it_runs_and_its_result_follows_at_once() -> None:
    """The last name on the screen is that of the kernel that never returned."""
    said: list[str] = []

    def noting(device: torch.device, chip: Chip) -> Work:
        said.append("made")
        return norm_work(32, device, chip)

    def broken(device: torch.device, chip: Chip) -> Work:
        raise RuntimeError("no memory")

    cases = [
        norm_case("good", make=noting, nbytes=1 << 30),
        norm_case("bad", make=broken),
    ]
    run_cases(cases, bench(FakeTimer(lambda call: 2e-6)), 1.0, said.append)
    assert said[:2] == ["rms_norm: good: ", "made"]
    good, name, bad = [text for text in said[2:] if text != "made"]
    assert good.startswith(f"{OURS} 2.0 µs, error ")
    assert (name, bad) == ("rms_norm: bad: ", "cannot: no memory\n")


def test_limits_are_a_copy_and_a_product() -> None:
    found = measure_device_limits(bench(FakeTimer(lambda call: 1e-3)))
    assert found.copy_bytes_per_s == pytest.approx((1 << 20) / 1e-3)
    assert found.matmul_flops_per_s == pytest.approx(2 * 64**3 / 1e-3)


@pytest.mark.parametrize(
    ("out", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 2.0], 0.5),
        ([-torch.inf, 2.0], [-torch.inf, 2.0], 0.0),
        ([torch.nan, 2.0], [torch.nan, 2.0], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1.0, 2.0], [-torch.inf, 2.0], torch.inf),
        ([], [], 0.0),
    ],
)
def test_relative_error(out: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(out), torch.tensor(expected)) == pytest.approx(error)


@pytest.mark.parametrize("where", ["out", "expected"])
def test_a_nan_on_one_side_is_an_error_that_no_tolerance_allows(where: str) -> None:
    out, expected = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    {"out": out, "expected": expected}[where][0] = torch.nan
    assert not relative_error(out, expected) <= 1e9


@pytest.mark.parametrize("value", [3.0, torch.nan])
@pytest.mark.parametrize("place", [PIECE - 1, PIECE + 4])
def test_every_piece_of_a_large_output_counts(place: int, value: float) -> None:
    expected = torch.ones(1).expand(PIECE + 5).clone()
    out = expected.clone()
    out[place] = value
    error = relative_error(out, expected)
    assert error == 2.0 or (value != value and error != error)


def test_of_integers_the_share_that_differs_counts() -> None:
    ids = torch.tensor([2**60, 2, 3, 4])
    assert relative_error(ids, ids.clone()) == 0.0
    # Equal as doubles.
    assert relative_error(ids, torch.tensor([2**60 + 1, 2, 3, 4])) == 0.25
    assert relative_error(ids.to(torch.uint8), torch.full((4,), 9, dtype=torch.uint8)) == 1.0


def test_quantised_numbers_are_numbers() -> None:
    out, expected = (torch.tensor(values, dtype=torch.int8) for values in ([126, 5], [127, 5]))
    assert relative_error(out, expected) == pytest.approx(1 / 127)


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64)])
def test_other_shapes_and_types_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected"):
        relative_error(torch.ones(2), other)
