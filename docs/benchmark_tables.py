"""Write the results of docs/results/*.json into the pages that show them, between their markers.

``python docs/benchmark_tables.py [FOLDER]``; pages are written there in place of docs/. A file is
named after its bench, and after a kind of machine where there is more than one: BENCH-KIND.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvferry.bench.report import format_scalar

HERE = Path(__file__).resolve().parent
PAGES = {"transfer": "transfer.md", "kv_quality": "transfer.md"}
"""Bench -> page; benchmarks.md shows those of all others."""
OTHERS = "benchmarks.md"
BEGIN = "<!-- results: written by `make docs` from docs/results/*.json -->"
END = "<!-- end of results -->"

BUSY_BEFORE, BUSY_AFTER = 0.6, 1.25
"""Load averages per core, before and after a run, above which others must have been at work."""


def render(page: str, reports: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """``page`` with fresh results. Raises ValueError when a marker is missing."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError("the page lacks a marker of its results")
    return head + BEGIN + "\n\n" + "\n".join(section(*each) for each in reports) + "\n" + END + tail


def section(name: str, report: dict[str, Any]) -> str:
    """One report, and its file's name: where it was measured, its claims, its rows."""
    machine = report["machine"]
    parts = [
        "### " + name.replace("-", ", "),
        "",
        f"Measured at commit `{report['commit']}` on {_on(machine)}.",
    ]
    parts += [_noise(report["options"], machine), ""]
    if report["claims"]:
        parts += [*_table([_claim(claim) for claim in report["claims"]]), ""]
    if report["rows"]:
        parts += [*_table(report["rows"]), ""]
    return "\n".join(parts)


def _on(machine: dict[str, Any]) -> str:
    software = ", ".join(
        f"{n} {machine[n]}" for n in ("torch", "transformers", "ray") if n in machine
    )
    return f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, {software}"


def _noise(options: dict[str, Any], machine: dict[str, Any]) -> str:
    before, after = options["load_average_before"], options["load_average_after"]
    loads = f"Load average {before} before, {after} after."
    if before > BUSY_BEFORE * machine["cores"] or after > BUSY_AFTER * machine["cores"]:
        return f"{loads} **The machine was shared and busy: times are too long, spreads too wide.**"
    return f"{loads} The machine is virtual, and may share its processors with others."


def _claim(claim: dict[str, Any]) -> dict[str, Any]:
    sign = "at most" if claim["better"] == "lower" else "at least"
    goal = "" if claim["goal"] is None else f"{sign} {format_scalar(claim['goal'])}"
    verdict = {None: "", True: "met", False: "**not met**"}[claim["met"]]
    return {
        "claim": f"`{claim['id']}`",
        "value": claim["value"],
        "±": claim["spread"],
        "unit": claim["unit"],
        "n": claim["n"],
        "goal": goal,
        "": verdict,
    }


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(format_scalar(row.get(name)) for name in columns) + " |")
    return lines


def reports() -> list[tuple[str, dict[str, Any]]]:
    """All result files with their names, in the order of these."""
    paths = sorted((HERE / "results").glob("*.json"), key=lambda path: path.stem)
    return [(path.stem, json.loads(path.read_text())) for path in paths]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for page in sorted({*PAGES.values(), OTHERS}):
        shown = [each for each in reports() if PAGES.get(each[1]["bench"], OTHERS) == page]
        text = render((HERE / page).read_text(encoding="utf-8"), shown)
        (folder / page).write_text(text, encoding="utf-8")
