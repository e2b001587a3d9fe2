"""What this machine can do at most: float32 products and reads from memory.

Measured in the same run as what is compared to it; a share is only as good as its limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvferry.bench.options import finished, option_parser, run_options
from kvferry.bench.report import Report

PRODUCT_SIZE = 1536
READ_BYTES = 512 << 20
REPEATS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Best of several tries: a limit is what was reached once."""

    threads: int
    flops_per_s: float
    """Of a square float32 matrix product."""
    bytes_per_s: float
    """Of reading memory far larger than any cache."""


def measure_limits(
    threads: int,
    *,
    product_size: int = PRODUCT_SIZE,
    read_bytes: int = READ_BYTES,
    repeats: int = REPEATS,
) -> Limits:
    """Leaves torch with ``threads`` threads."""
    torch.set_num_threads(threads)
    left, right = torch.randn(2, product_size, product_size)
    out = torch.empty(product_size, product_size)
    product_s = _best(lambda: torch.mm(left, right, out=out), repeats)
    memory = torch.ones(read_bytes // 4)
    read_s = _best(lambda: torch.sum(memory), repeats)
    return Limits(
        threads=threads,
        flops_per_s=2 * product_size**3 / product_s,
        bytes_per_s=memory.numel() * 4 / read_s,
    )


def run(args: list[str]) -> Report:
    """Both limits, with one thread and with ``--threads``."""
    options = option_parser("limits", __doc__.partition("\n")[0]).parse_args(args)
    plain = run_options(options)
    sizes = {"product_size": 64, "read_bytes": 1 << 20, "repeats": 2} if options.quick else {}
    found = [measure_limits(n, **sizes) for n in sorted({1, options.threads})]
    rows = [
        {
            "threads": limits.threads,
            "float32 GFLOP/s": limits.flops_per_s / 1e9,
            "read GB/s": limits.bytes_per_s / 1e9,
        }
        for limits in found
    ]
    return Report(bench="limits", rows=rows, options=finished(plain))


def _best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
