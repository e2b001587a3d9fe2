"""What the command lines of all benches share."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from pathlib import Path

from kvferry.bench.report import Scalar, why_not_written


def option_parser(bench: str, description: str) -> argparse.ArgumentParser:
    """A parser with the options that every bench has."""
    parser = argparse.ArgumentParser(prog=f"kvferry bench {bench}", description=description)
    parser.add_argument(
        "--threads", type=positive_count, default=2, help="CPU threads (default: 2)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    return parser


def positive_count(text: str) -> int:
    """Type of an argument: a whole number from 1 on."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def positive_seconds(text: str) -> float:
    """Type of an argument: a finite time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def new_file(text: str) -> Path:
    """Type of an argument: a file that can be written, known before a long run."""
    path = Path(text)
    reason = why_not_written(path)
    if reason is not None:
        raise argparse.ArgumentTypeError(reason)
    return path


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
