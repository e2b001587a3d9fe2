"""What the command lines of all benches share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from kvferry.bench.report import Scalar


def option_parser(bench: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every bench has."""
    parser = argparse.ArgumentParser(prog=f"kvferry bench {bench}", description=description)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    return parser


def run_options(options: argparse.Namespace) -> dict[str, Scalar]:
    """The options of a run as the report keeps them, with the load that the machine had before."""
    plain = {name: value for name, value in vars(options).items() if _is_plain(value)}
    return {**plain, "load_average_before": load_average()}


def finished(options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """``run_options`` at the end of the run: what else ran meanwhile can be judged from both."""
    return {**options, "load_average_after": load_average()}


def load_average() -> float:
    """Runnable tasks of the whole machine over the last minute; this process counts too."""
    return round(os.getloadavg()[0], 2)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool)
