"""Kernels: what they compile to, the least time they need, and on a GPU the time that they take."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import Progress

from kvferry.bench.cuda_timer import cuda_bench
from kvferry.bench.kernel_cases.case import Case
from kvferry.bench.kernel_cases.registry import chosen_cases, variants
from kvferry.bench.kernel_compile import Built, compile_cases
from kvferry.bench.kernel_device import Bench, measure_device_limits, run_cases
from kvferry.bench.kernel_report import device_claims, device_rows, markdown_page, ranked
from kvferry.bench.kernel_table import compiled_by_case, compiled_rows, roofline_rows
from kvferry.bench.options import (
    finished,
    new_file,
    positive_count,
    positive_seconds,
    run_options,
)
from kvferry.bench.report import Better, Claim, Report, Scalar
from kvferry.kernels.chips import CHIPS, Chip

ONE_PER_ARCH = "A100,H100,B200"
BUDGET_S = 220.0


def run(args: list[str]) -> Report:
    """Without ``--compile-only`` or ``--device``: the roofline alone. Raises StartupError where
    there is no such device.
    """
    parser = _parser()
    options = parser.parse_args(args)
    plain = run_options(options)
    try:
        cases = chosen_cases(options.kernel, ci_only=options.ci)
        chips = _chips(options.chip)
    except ValueError as error:
        parser.error(f"--kernel: {error}")
    except KeyError as error:
        parser.error(f"--chip: {error} is none of: {', '.join(CHIPS)}")
    if options.tune and options.device is None:
        parser.error("--tune times on a device: add --device cuda")
    if options.compile_only:
        report = compile_report(cases, chips, options.processes, plain)
    elif options.device is not None:
        bench = cuda_bench(options.seed, time.monotonic)
        measure = tuning_report if options.tune else device_report
        report = measure(cases, bench, options.processes, options.budget, plain)
    else:
        report = Report(bench="kernels", rows=roofline_rows(cases), options=finished(plain))
    if options.markdown is not None:
        options.markdown.write_text(markdown_page(report), encoding="utf-8")
    return report


def compile_report(
    cases: Sequence[Case], chips: Sequence[Chip], processes: int, options: dict[str, Scalar]
) -> Report:
    """Compile all for every chip; one claim, that no rule is broken."""
    built = _compile(cases, chips, processes)
    rows, wrong = compiled_rows(built)
    return Report(
        bench="kernels", rows=rows, claims=[_compiled(wrong, rows)], options=finished(options)
    )


def device_report(
    cases: Sequence[Case],
    bench: Bench,
    processes: int,
    budget_s: float,
    options: dict[str, Scalar],
) -> Report:
    """Compile side by side, then check and time one after the other, all within the budget.

    What is compiled first is found in Triton's cache when it is launched.
    """
    started = bench.clock()
    built = _compile(cases, [bench.chip], processes, lambda: bench.clock() - started < budget_s / 2)
    rows, wrong = compiled_rows(built)
    limits = measure_device_limits(bench)
    results = run_cases(cases, bench, started + budget_s, _say)
    measured: dict[str, Scalar] = {
        "chip": bench.chip.name,
        "measured_copy_bytes_per_s": limits.copy_bytes_per_s,
        "measured_matmul_flops_per_s": limits.matmul_flops_per_s,
        "total_s": round(bench.clock() - started, 1),
    }
    return Report(
        bench="kernels",
        rows=device_rows(results, limits, compiled_by_case(built)),
        claims=[
            _compiled(wrong, rows),
            *device_claims(results, limits, bench.chip.name),
        ],
        options=finished(options) | measured,
    )


def tuning_report(
    cases: Sequence[Case],
    bench: Bench,
    processes: int,
    budget_s: float,
    options: dict[str, Scalar],
) -> Report:
    """Each case that has candidates with all of them, the fastest first; promises nothing."""
    started = bench.clock()
    tuned = [variants(case, bench.chip) for case in cases if case.candidates is not None]
    flat = [variant for group in tuned for variant in group]
    built = _compile(flat, [bench.chip], processes, lambda: bench.clock() - started < budget_s / 2)
    limits = measure_device_limits(bench)
    results = run_cases(flat, bench, started + budget_s, _say)
    rows = device_rows(results, limits, compiled_by_case(built))
    return Report(
        bench="kernels",
        rows=ranked(rows, [len(group) for group in tuned]),
        options=finished(options) | {"chip": bench.chip.name},
    )


def _compile(
    cases: Sequence[Case],
    chips: Sequence[Chip],
    processes: int,
    in_time: Callable[[], bool] = lambda: True,
) -> list[Built]:
    """With a bar on standard error while it lasts."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=None)
        return compile_cases(
            cases,
            chips,
            processes=processes,
            in_time=in_time,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _say(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


def _compiled(wrong: int, rows: Sequence[object]) -> Claim:
    return Claim(
        id="kernels.compile_violations", value=wrong, better=Better.LOWER, goal=0, n=len(rows)
    )


def _chips(names: str) -> list[Chip]:
    """Each chip of a list with commas, once. Raises KeyError for a name that is unknown."""
    return list(dict.fromkeys(CHIPS[name.strip()] for name in names.split(",")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry bench kernels", description=__doc__.partition("\n")[0]
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--compile-only", action="store_true", help="compile for --chip; needs no GPU"
    )
    where.add_argument("--device", choices=["cuda"], help="check and time every case there")
    parser.add_argument(
        "--tune", action="store_true", help="time other tiles of the cases that have candidates"
    )
    parser.add_argument("--kernel", metavar="NAME", help="the cases of one kernel only")
    parser.add_argument("--ci", action="store_true", help="the cases that CI compiles only")
    parser.add_argument(
        "--chip",
        default=ONE_PER_ARCH,
        metavar="A,B",
        help="chips that --compile-only is for (%(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=positive_count,
        default=len(os.sched_getaffinity(0)),
        help="that compile side by side (default: one per core)",
    )
    parser.add_argument(
        "--budget",
        type=positive_seconds,
        default=BUDGET_S,
        metavar="SECONDS",
        help="of a run on a device; what it leaves no time for is reported (%(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="write a page there too")
    return parser
