"""Parts from which tests of the kernel bench build their runs: cases, clocks, compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.bench.kernel_compile import Job, Outcome
from kvferry.bench.kernel_device import Bench
from kvferry.bench.kernel_timing import Call, Round
from kvferry.kernels.aot import Compiled
from kvferry.kernels.chips import INTERPRETER, Chip
from kvferry.kernels.rms_norm import reference
from kvferry.kernels.rms_norm.wrapper import rms_norm_launch

CPU = torch.device("cpu")


class FakeClock:
    """Moves when told, and a little at each look where asked to."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self._step = 0.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


@dataclass(eq=False)
class FakeTimer:
    """Runs calls on the CPU and reports the seconds that the test chose for each."""

    seconds_of: Callable[[Call], float] = lambda call: 1e-4
    overhead: float = 0.0
    """Of starting a round, shared by its repetitions."""
    rounds: list[tuple[int, int]] = field(default_factory=list)
    """(calls, repetitions) of each round."""

    def prepare(self, calls: Sequence[Call]) -> Round:
        for call in calls:
            call()

        def a_round(repeats: int) -> float:
            self.rounds.append((len(calls), repeats))
            return sum(map(self.seconds_of, calls)) + self.overhead / repeats

        return a_round


@dataclass(eq=False)
class FakeCompiler:
    """Answers at once."""

    outcome: Callable[[Job], Outcome]
    jobs: list[Job] = field(default_factory=list)
    closed: int = 0

    def compile(self, job: Job) -> Outcome:
        self.jobs.append(job)
        return self.outcome(job)

    def close(self) -> None:
        self.closed += 1


def compiled(**changes: Any) -> Compiled:
    """Of a launch that breaks no rule."""
    plain: dict[str, Any] = {
        "registers": 100,
        "spills": 0,
        "shared": 1024,
        "matrix_instructions": {},
        "uses_tma": False,
        "warp_specialised": False,
        "writes": True,
    }
    return Compiled(**(plain | changes))


def bench(timer: FakeTimer | None = None, clock: Callable[[], float] | None = None) -> Bench:
    """On the CPU, in the interpreter, with a fake clock and timer."""
    return Bench(
        device=CPU,
        chip=INTERPRETER,
        timer=timer or FakeTimer(),
        clock=clock or FakeClock(),
        copy_bytes=1 << 20,
        product_size=64,
    )


def norm_case(name: str = "tiny", size: int = 32, **changes: Any) -> Case:
    """A real kernel at a size that the interpreter does in a moment."""
    plain: dict[str, Any] = {
        "kernel": "rms_norm",
        "name": name,
        "make": partial(norm_work, size),
        "nbytes": 1 << 20,
        "flops": 100,
        "tolerance": 1e-5,
        "limit": Limit.COPY,
    }
    return Case(**(plain | changes))


def norm_work(size: int, device: torch.device, chip: Chip, **changes: Any) -> Work:
    x = torch.randn(2, size, device=device)
    weight = torch.randn(size, device=device)
    out = torch.empty_like(x)
    plain: dict[str, Any] = {
        "launches": [rms_norm_launch(x, None, weight, 1e-5, out, None, chip)],
        "outputs": [out],
        "expected": lambda: [reference.rms_norm(x, weight, 1e-5)],
    }
    return Work(**(plain | changes))
