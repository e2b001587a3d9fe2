"""The one format that every bench writes: a table for people, JSON for the results table.

A **claim** is one number that the docs or an issue state, measured in the run that reports it,
beside what it is compared to. JSON schema::

    {"bench": str, "commit": str, "machine": {str: str | int}, "options": {str: scalar},
     "rows": [{column: scalar}],
     "claims": [{"id": str, "value": number, "goal": number | null, "better": "higher" | "lower",
                 "n": int, "spread": number, "unit": str, "met": bool | null}]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from kvferry.bench.machine import commit, machine_facts
from kvferry.bench.stats import Interval

Scalar = str | int | float | bool | None


class Better(StrEnum):
    """Which direction of a claim is the good one."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number of the run."""

    id: str
    value: float
    better: Better
    goal: float | None = None
    """None: measured and reported, not promised."""
    n: int = 1
    """How many measurements stand behind the value."""
    spread: float = 0.0
    """Half the width of its interval, or the distance of the quartiles; same unit as the value."""
    unit: str = ""

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.better is Better.LOWER else self.value >= self.goal

    def to_json(self) -> dict[str, Scalar]:
        return {
            "id": self.id,
            "value": self.value,
            "goal": self.goal,
            "better": self.better.value,
            "n": self.n,
            "spread": self.spread,
            "unit": self.unit,
            "met": self.met,
        }


def claim_from(
    interval: Interval, *, id: str, better: Better, goal: float | None = None, unit: str = ""
) -> Claim:
    """A claim whose value is the median of an interval."""
    return Claim(
        id=id,
        value=interval.median,
        better=better,
        goal=goal,
        n=interval.n,
        spread=interval.spread,
        unit=unit,
    )


@dataclass(slots=True, kw_only=True)
class Report:
    """What one run of one bench found."""

    bench: str
    rows: Sequence[Mapping[str, Scalar]] = ()
    """Table rows; the columns are the keys of all rows in order of appearance."""
    claims: Sequence[Claim] = ()
    options: Mapping[str, Scalar] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=machine_facts)
    commit: str = field(default_factory=commit)

    @property
    def all_met(self) -> bool:
        return all(claim.met is not False for claim in self.claims)

    def to_json(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "commit": self.commit,
            "machine": dict(self.machine),
            "options": dict(self.options),
            "rows": [dict(row) for row in self.rows],
            "claims": [claim.to_json() for claim in self.claims],
        }

    def write(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        scratch = path.with_name(f".{path.name}.partial")
        scratch.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        scratch.replace(path)

    def print(self, console: Console) -> None:
        """Both tables and what they were measured on."""
        if self.rows:
            _print_whole(_table(f"kvferry bench {self.bench}", self.rows), console)
        if self.claims:
            console.print(_table("claims", [_claim_row(claim) for claim in self.claims]))
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        console.print(f"commit {self.commit}; {facts}", style="dim", highlight=False)


def why_not_written(path: Path) -> str | None:
    """Why a report cannot be written there; None when it can."""
    if path.is_dir():
        return f"{path} is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    return None if os.access(path.parent, os.W_OK) else f"{path.parent} cannot be written to"


def _print_whole(table: Table, console: Console) -> None:
    """A terminal folds cells that are too wide; a file gets lines as long as they need to be."""
    natural = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if console.is_terminal or natural <= console.width:
        console.print(table)
    else:
        table.width = natural
        console.print(table, crop=False, no_wrap=True, soft_wrap=True)


def _table(title: str, rows: Sequence[Mapping[str, Scalar]]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(format_scalar(row.get(name)) for name in columns))
    return table


def _claim_row(claim: Claim) -> dict[str, Scalar]:
    sign = "<=" if claim.better is Better.LOWER else ">="
    verdict = {None: "reported", True: "met", False: "NOT MET"}[claim.met]
    return {
        "claim": claim.id,
        "value": claim.value,
        "±": claim.spread,
        "unit": claim.unit,
        "goal": "" if claim.goal is None else f"{sign} {format_scalar(claim.goal)}",
        "n": claim.n,
        "": verdict,
    }


def format_scalar(value: Scalar) -> str:
    """Numbers with four significant digits, the rest as it is."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
