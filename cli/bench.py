"""``kvferry bench``: run one of the measurements in bench/."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated, Protocol, cast

import typer
from rich.table import Table

import kvferry.bench
from kvferry.bench.report import Report, why_not_written
from kvferry.cli.console import stdout
from kvferry.core.errors import StartupError

FOLDER = Path(kvferry.bench.__path__[0])


class Bench(Protocol):
    """A module of bench/ that measures something."""

    def run(self, args: list[str]) -> Report:
        """Parse its own options, measure, and report."""
        ...


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which one; without: the list.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too.")
    ] = None,
) -> None:
    """Run the measurement NAME and print its table and claims.

    Options of the measurement itself follow its name; `kvferry bench NAME -- --help` lists them.
    Exits with 1 when a claim misses its goal.
    """
    known = benches()
    if name is None:
        stdout().print(_listing(known))
        return
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of: {', '.join(known)}", param_hint="NAME")
    reason = None if json_file is None else why_not_written(json_file)
    if reason is not None:
        raise typer.BadParameter(reason, param_hint="--json")
    report = _module(name).run(list(context.args))
    report.print(stdout())
    if json_file is not None:
        report.write(json_file)
    if not report.all_met:
        raise typer.Exit(1)


def _module(name: str) -> Bench:
    """Raises StartupError where a library that the bench measures is not installed."""
    try:
        return cast(Bench, importlib.import_module(f"kvferry.bench.{name}"))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("kvferry"):
            raise
        raise StartupError(
            f"bench {name} needs {error.name}, which is not installed: "
            f"pip install -c constraints.txt {error.name}"
        ) from error


def benches() -> dict[str, str]:
    """Name -> first line of the docstring of each module in bench/ that has ``run``.

    Read from the source: importing them all would load torch, Ray and more for a list of names.
    """
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def _listing(known: dict[str, str]) -> Table:
    table = Table("bench", "what it measures")
    for name, what in known.items():
        table.add_row(name, what)
    return table
