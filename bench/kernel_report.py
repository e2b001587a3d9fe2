"""Rows, claims and the markdown page of a run on a device."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from kvferry.bench.kernel_cases.case import Case, Limit
from kvferry.bench.kernel_device import OURS, DeviceLimits, Result
from kvferry.bench.kernel_table import floors, markdown
from kvferry.bench.report import Better, Claim, Report, Scalar

GOALS_OF = "H200"
"""The chip that the goals are of; on others shares are reported, not promised."""


def claim_id(case: Case, what: str) -> str:
    """``kernels.flash_decoding.b16_8k.copy_share``: letters, digits and _ of the case's name."""
    name = re.sub(r"[^a-z0-9]+", "_", case.name.lower()).strip("_")
    return f"kernels.{case.kernel}.{name}.{what}"


def device_rows(
    results: Sequence[Result],
    limits: DeviceLimits,
    compiled: Mapping[tuple[str, str], Mapping[str, Scalar]],
) -> list[dict[str, Scalar]]:
    """A row per case; ``compiled`` has what its code costs, by kernel and case."""
    return [
        {
            "kernel": result.case.kernel,
            "case": result.case.name,
            **_measured(result, limits),
            **compiled.get((result.case.kernel, result.case.name), {}),
            **floors(result.case),
            "notes": "; ".join(result.notes),
        }
        for result in results
    ]


def ranked(rows: Sequence[dict[str, Scalar]], groups: Sequence[int]) -> list[dict[str, Scalar]]:
    """Rows of one shape after another, each group fastest first with its rank; the untimed last."""
    found: list[dict[str, Scalar]] = []
    start = 0
    for size in groups:
        group = rows[start : start + size]
        timed = sorted((row for row in group if "µs" in row), key=lambda row: float(row["µs"] or 0))
        found += [{"rank": rank, **row} for rank, row in enumerate(timed, start=1)]
        found += [{"rank": None, **row} for row in group if "µs" not in row]
        start += size
    return found


def device_claims(results: Sequence[Result], limits: DeviceLimits, chip: str) -> list[Claim]:
    """Nothing wrong, nothing left out unseen, and for each timed case its share and its peers."""
    claims = [
        Claim(
            id="kernels.wrong",
            value=sum(result.is_wrong for result in results),
            better=Better.LOWER,
            goal=0,
            n=sum(result.error is not None for result in results),
        ),
        Claim(
            id="kernels.not_measured",
            value=sum(OURS not in result.timings for result in results),
            better=Better.LOWER,
            n=len(results),
        ),
    ]
    by_name = {(result.case.kernel, result.case.name): result for result in results}
    for result in results:
        claims += _claims_of(result, limits, by_name, has_goals=chip == GOALS_OF)
    return claims


def markdown_page(report: Report) -> str:
    """The report as a page of its own: where, claims, rows."""
    facts = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    options = ", ".join(f"{name} {value}" for name, value in report.options.items())
    claims: list[dict[str, Scalar]] = [
        {**claim.to_json(), "met": {None: "", True: "met", False: "not met"}[claim.met]}
        for claim in report.claims
    ]
    parts = [f"# kvferry bench {report.bench}", "", f"Commit {report.commit}; {facts}.", ""]
    parts += [f"Options: {options}.", "", *markdown(claims), "", *markdown(report.rows), ""]
    return "\n".join(parts)


def _measured(result: Result, limits: DeviceLimits) -> dict[str, Scalar]:
    row: dict[str, Scalar] = {"error": _finite(result.error), "tolerance": result.case.tolerance}
    ours = result.timings.get(OURS)
    if ours is None:
        return row
    case = result.case
    row |= {
        "µs": ours.seconds * 1e6,
        "± µs": ours.spread * 1e6,
        "GB/s": case.nbytes / ours.seconds / 1e9,
        "TFLOP/s": case.flops / ours.seconds / 1e12,
        "limit": case.limit.value,
        "share": result.share(limits),
    }
    peers = {name: timing for name, timing in result.timings.items() if name != OURS}
    if peers:
        best = min(peers, key=lambda name: peers[name].seconds)
        row |= {
            "fastest peer": best,
            "peer µs": peers[best].seconds * 1e6,
            "speedup": result.peer_speedup,
        }
    return row | {"copies": result.copies, "rounds": ours.rounds}


def _claims_of(
    result: Result,
    limits: DeviceLimits,
    by_name: Mapping[tuple[str, str], Result],
    *,
    has_goals: bool,
) -> list[Claim]:
    case, claims = result.case, []
    share, speedup = result.share(limits), result.peer_speedup
    if share is not None:
        kind = "copy_share" if case.limit is Limit.COPY else "matmul_share"
        claims.append(_claim(case, kind, share, case.goal if has_goals else None, result))
    if speedup is not None:
        goal = case.peer_goal if has_goals else None
        claims.append(_claim(case, "peer_speedup", speedup, goal, result))
    other = by_name.get((case.kernel, case.not_slower_than or ""))
    if other is not None and OURS in other.timings and OURS in result.timings:
        ratio = other.timings[OURS].seconds / result.timings[OURS].seconds
        goal = 1.0 if has_goals else None
        claims.append(_claim(case, "baseline_speedup", ratio, goal, result))
    return claims


def _claim(case: Case, what: str, value: float, goal: float | None, result: Result) -> Claim:
    timing = result.timings[OURS]
    return Claim(
        id=claim_id(case, what),
        value=value,
        better=Better.HIGHER,
        goal=goal,
        n=timing.rounds,
        spread=value * timing.spread / timing.seconds if timing.seconds else 0.0,
    )


def _finite(error: float | None) -> Scalar:
    """JSON has neither NaN nor infinity; they read as text."""
    return str(error) if error is not None and not math.isfinite(error) else error
