"""Plays random schedules for a given time, or one alone.

    python -m kv_sim.soak --seconds 600
    python -m kv_sim.soak --schedule-seed 123456

The first failure's trace is printed, and how to play it again.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kv_sim.schedule import Result, run_schedule

COLLECT_EVERY = 200
SEED_STRIDE = 1_000_003
"""Between the first seeds of two runs, so that they share no schedules."""


@dataclass(slots=True)
class Tally:
    """What came of many schedules."""

    seed: int
    """Of the run; schedule i has seed ``seed * SEED_STRIDE + i``."""
    schedules: int = 0
    wrong_tokens: int = 0
    leaked_blocks: int = 0
    hangs: int = 0
    broken_rules: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    failures: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.schedules += 1
        self.outcomes += result.outcomes
        self.covered += result.covered
        self.wrong_tokens += result.wrong_tokens
        self.leaked_blocks += result.leaked
        self.hangs += bool(result.hang)
        self.broken_rules += result.broken_rules
        if result.failed:
            self.failures.append(result)

    def __str__(self) -> str:
        return (
            f"schedules {self.schedules:,}: wrong tokens {self.wrong_tokens}, leaked blocks "
            f"{self.leaked_blocks}, hangs {self.hangs}, other broken rules {self.broken_rules} "
            f"(seed {self.seed}, {sum(self.outcomes.values()):,} requests, "
            f"{self.outcomes['done']:,} of them done)"
        )


def play(seed: int, goes_on: Callable[[Tally], bool]) -> Tally:
    """Schedules of a run until told to stop, or until three have failed."""
    tally = Tally(seed)
    torch.set_num_threads(1)
    # Steps that fail on purpose would fill the log.
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()  # what was there before is looked at no more
    gc.disable()
    try:
        while goes_on(tally) and len(tally.failures) < 3:
            tally.add(run_schedule(seed * SEED_STRIDE + tally.schedules))
            if tally.schedules % COLLECT_EVERY == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
        logging.disable(logging.NOTSET)
    return tally


def report(result: Result) -> str:
    """A failed schedule, played again with its trace."""
    again = run_schedule(result.seed, trace=True)
    lines = [*again.trace, "", *result.violations[:10], result.hang, result.leak]
    lines.append(f"play it alone: make soak SCHEDULE_SEED={result.seed}")
    return "\n".join(line for line in lines if line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--schedule-seed", type=int)
    arguments = parser.parse_args()
    if arguments.schedule_seed is not None:
        result = run_schedule(arguments.schedule_seed)
        print(report(result))
        return int(result.failed)
    until = time.monotonic() + arguments.seconds
    tally = play(arguments.seed, lambda _: time.monotonic() < until)
    for result in tally.failures[:1]:
        print(report(result))
    print(tally)
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
