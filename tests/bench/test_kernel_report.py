"""Claims have stable ids, goals are of one chip, and nothing that failed is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernel_bench import norm_case

from kvferry.bench.kernel_cases.case import Case, Limit
from kvferry.bench.kernel_device import OURS, DeviceLimits, Result
from kvferry.bench.kernel_report import (
    claim_id,
    device_claims,
    device_rows,
    markdown_page,
    ranked,
)
from kvferry.bench.kernel_timing import Timing
from kvferry.bench.report import Claim, Report

LIMITS = DeviceLimits(copy_bytes_per_s=1e12, matmul_flops_per_s=1e15)


def timing(seconds: float) -> Timing:
    return Timing(seconds=seconds, spread=seconds / 10, rounds=50)


def result(case: Case, seconds: float | None = 2e-6, **changes: Any) -> Result:
    timings = {} if seconds is None else {OURS: timing(seconds)}
    plain: dict[str, Any] = {"error": 0.0, "timings": timings}
    return Result(case=case, **(plain | changes))


def claims(results: list[Result], chip: str = "H200") -> dict[str, Claim]:
    return {claim.id: claim for claim in device_claims(results, LIMITS, chip)}


def test_ids_are_made_of_the_cases_name() -> None:
    case = norm_case("causal 8k, bf16 (D=128)")
    assert claim_id(case, "copy_share") == "kernels.rms_norm.causal_8k_bf16_d_128.copy_share"


@pytest.mark.parametrize(
    ("limit", "kind", "share"), [(Limit.COPY, "copy", 0.5), (Limit.MATMUL, "matmul", 0.25)]
)
def test_a_share_is_held_to_its_goal_on_the_chip_of_the_goals(
    limit: Limit, kind: str, share: float
) -> None:
    case = norm_case("a", nbytes=10**6, flops=5 * 10**8, limit=limit, goal=0.4)
    found = claims([result(case)])[f"kernels.rms_norm.a.{kind}_share"]
    assert found.value == pytest.approx(share)
    assert found.goal == 0.4
    assert found.met is (share >= 0.4)
    assert found.n == 50
    assert found.spread == pytest.approx(share / 10)


def test_on_another_chip_nothing_is_promised() -> None:
    case = norm_case("a", goal=0.9, peer_goal=1.0, not_slower_than="a")
    found = claims([result(case, timings={OURS: timing(1.0), "peer": timing(0.5)})], "RTX 5060")
    speeds = [claim for claim in found.values() if claim.id.startswith("kernels.rms_norm")]
    assert len(speeds) == 3
    assert all(claim.met is None for claim in speeds)


def test_the_fastest_peer_is_the_one_to_beat() -> None:
    timings = {OURS: timing(2e-6), "slow": timing(8e-6), "fast": timing(1e-6)}
    case = norm_case("a", peer_goal=1.0)
    found = claims([result(case, timings=timings)])["kernels.rms_norm.a.peer_speedup"]
    assert found.value == pytest.approx(0.5)
    assert found.met is False


def test_a_case_is_held_to_another_that_it_must_not_be_slower_than() -> None:
    fp8, bf16 = norm_case("fp8", not_slower_than="bf16"), norm_case("bf16")
    name = "kernels.rms_norm.fp8.baseline_speedup"
    assert claims([result(fp8, 2e-6), result(bf16, 3e-6)])[name].met is True
    assert claims([result(fp8, 4e-6), result(bf16, 3e-6)])[name].met is False
    assert name not in claims([result(fp8), result(bf16, None)])


def test_wrong_results_fail_and_missing_ones_are_counted() -> None:
    results = [
        result(norm_case("a")),
        result(norm_case("right too")),
        result(norm_case("b"), None, error=0.5),
        result(norm_case("c"), None, error=float("nan")),
        result(norm_case("d"), None, error=None, notes=["skipped: out of time"]),
    ]
    found = claims(results)
    assert (found["kernels.wrong"].value, found["kernels.wrong"].n) == (2, 4)
    assert found["kernels.wrong"].met is False
    assert (found["kernels.not_measured"].value, found["kernels.not_measured"].n) == (3, 5)


def rows(*results: Result) -> list[dict[str, Any]]:
    return device_rows(results, LIMITS, {("rms_norm", "a"): {"registers": 40}})


def test_a_row_has_what_was_measured_beside_what_limits_it() -> None:
    timings = {OURS: timing(2e-6), "peer": timing(3e-6), "slow": timing(9e-6)}
    case = norm_case("a", nbytes=10**6, flops=10**6)
    (row,) = rows(result(case, timings=timings, copies=7))
    assert row["µs"] == pytest.approx(2.0)
    assert row["GB/s"] == pytest.approx(500.0)
    assert row["TFLOP/s"] == pytest.approx(0.5)
    assert row["share"] == pytest.approx(0.5)
    assert row["fastest peer"] == "peer"
    assert row["speedup"] == pytest.approx(1.5)
    assert row["registers"] == 40
    assert row["H200 µs"] == pytest.approx(1e6 / 4.8e12 * 1e6)
    assert row["copies"] == 7


@pytest.mark.parametrize("error", ["nan", "inf"])
def test_rows_of_failures_are_json_with_their_reason(error: str, tmp_path: Path) -> None:
    found = rows(result(norm_case("a"), None, error=float(error), notes=["wrong"]))
    report = Report(bench="kernels", rows=found, machine={}, commit="abc")
    report.write(tmp_path / "kernels.json")
    (row,) = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert (row["error"], row["notes"]) == (error, "wrong")


def test_tuned_tiles_are_ranked_within_their_shape() -> None:
    seconds = (3e-6, 1e-6, None, 9e-6, 8e-6)
    names = ("a", "a @ x", "a @ y", "b", "b @ x")
    found = ranked(
        rows(*(result(norm_case(n), s) for n, s in zip(names, seconds, strict=True))), [3, 2]
    )
    assert [(row["rank"], row["case"]) for row in found] == [
        (1, "a @ x"),
        (2, "a"),
        (None, "a @ y"),
        (1, "b @ x"),
        (2, "b"),
    ]


def test_the_page_has_the_machine_the_claims_and_the_rows() -> None:
    results = [result(norm_case("a", goal=0.1)), result(norm_case("b"), None)]
    report = Report(
        bench="kernels",
        rows=rows(*results),
        claims=device_claims(results, LIMITS, "H200"),
        options={"chip": "H200"},
        machine={"gpus": "NVIDIA H200"},
        commit="abc",
    )
    page = markdown_page(report)
    assert "Commit abc; gpus NVIDIA H200." in page
    assert "chip H200" in page
    assert "kernels.rms_norm.a.copy_share" in page
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert len(tables) == 2 + len(report.claims) + 2 + 2
