"""Rows of `kvferry bench kernels`: what compiled code costs, the least time a case can take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvferry.bench.kernel_cases.case import Case
from kvferry.bench.kernel_compile import Built, Failure
from kvferry.bench.kernel_rules import case_violations, launch_violations
from kvferry.bench.report import Scalar, format_scalar
from kvferry.kernels.aot import Compiled
from kvferry.kernels.chips import CHIPS
from kvferry.kernels.launch import Launch

ROOFLINE_CHIPS = tuple(CHIPS[name] for name in ("H100", "H200", "B200", "RTX 5060"))


def floors(case: Case) -> dict[str, Scalar]:
    """Per chip the floor in microseconds, from data sheets."""
    return {
        f"{chip.name} µs": chip.floor_seconds(case.nbytes, case.flops) * 1e6
        for chip in ROOFLINE_CHIPS
    }


def roofline_rows(cases: Sequence[Case]) -> list[dict[str, Scalar]]:
    """A row per case: bytes, FLOP and floors."""
    return [
        {
            "kernel": case.kernel,
            "case": case.name,
            "MB": case.nbytes / 1e6,
            "GFLOP": case.flops / 1e9,
            **floors(case),
        }
        for case in cases
    ]


def compiled_rows(built: Sequence[Built]) -> tuple[list[dict[str, Scalar]], int]:
    """A row per launch and chip, and how many of them break a rule or did not compile."""
    rows, wrong = [], 0
    for group in _by_case(built):
        verdicts = _verdicts(group)
        wrong += sum(verdict != "ok" for verdict in verdicts)
        for each, verdict in zip(group, verdicts, strict=True):
            rows.append({**_row(each), "verdict": verdict, **floors(each.case)})
    return rows, wrong


def compiled_by_case(built: Sequence[Built]) -> dict[tuple[str, str], dict[str, Scalar]]:
    """Kernel and case -> what its launches need and the first verdict that is not ok, one chip."""
    found = {}
    for group in _by_case(built):
        compiled = [each.outcome for each in group if isinstance(each.outcome, Compiled)]
        broken = [verdict for verdict in _verdicts(group) if verdict != "ok"]
        fields = {**_fields(compiled), "compiled": broken[0] if broken else "ok"}
        found[group[0].case.kernel, group[0].case.name] = fields
    return found


def markdown(rows: Sequence[Mapping[str, Scalar]]) -> list[str]:
    """Lines of a table; the columns are the keys of all rows in order of appearance."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    numeric = [all(isinstance(r.get(name), int | float | None) for r in rows) for name in columns]
    return [
        "| " + " | ".join(columns) + " |",
        "|" + "".join("--:|" if right else "---|" for right in numeric),
        *(
            "| " + " | ".join(format_scalar(row.get(name)) for name in columns) + " |"
            for row in rows
        ),
    ]


def _by_case(built: Sequence[Built]) -> Iterator[list[Built]]:
    """Launches of one case on one chip, which stand side by side."""
    group: list[Built] = []
    for each in built:
        if group and (group[0].case is not each.case or group[0].chip != each.chip):
            yield group
            group = []
        group.append(each)
    if group:
        yield group


def _verdicts(group: Sequence[Built]) -> list[str]:
    """One per launch; what the whole case breaks is said at its first."""
    case, chip = group[0].case, group[0].chip
    compiled = [each.outcome for each in group if isinstance(each.outcome, Compiled)]
    whole = case_violations(case, chip, compiled) if len(compiled) == len(group) else []
    verdicts = []
    for number, each in enumerate(group):
        if isinstance(each.outcome, Failure):
            broken = [each.outcome.reason]
        else:
            broken = launch_violations(case, chip, each.outcome)
        broken += whole if number == 0 else []
        verdicts.append("; ".join(broken) or "ok")
    return verdicts


def _row(built: Built) -> dict[str, Scalar]:
    compiled = [built.outcome] if isinstance(built.outcome, Compiled) else []
    return {
        "kernel": built.case.kernel,
        "case": built.case.name,
        "arch": f"sm_{built.chip.arch}",
        **(_launch_fields(built.launch) if built.launch is not None else {}),
        **_fields(compiled),
    }


def _fields(compiled: Sequence[Compiled]) -> dict[str, Scalar]:
    """What several launches need at most, in the columns of a table."""
    matrix: dict[str, int] = {}
    for each in compiled:
        for name, count in each.matrix_instructions.items():
            matrix[name] = matrix.get(name, 0) + count
    return {
        "registers": max((each.registers for each in compiled), default=None),
        "spills": max((each.spills for each in compiled), default=None),
        "shared": max((each.shared for each in compiled), default=None),
        "matrix": " ".join(f"{name} x{count}" for name, count in matrix.items()),
        "TMA": "yes" if any(each.uses_tma for each in compiled) else "",
        "specialised": "yes" if any(each.warp_specialised for each in compiled) else "",
    }


def _launch_fields(launch: Launch) -> dict[str, Scalar]:
    return {
        "function": launch.kernel.fn.__name__.removesuffix("_kernel"),
        "constants": " ".join(f"{name}={value}" for name, value in launch.constants.items()),
        "warps": launch.num_warps,
        "stages": launch.num_stages,
    }
