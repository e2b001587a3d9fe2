"""How kernels are timed: medians of rounds over inputs that together exceed the L2 cache.

A round runs every call once, each on inputs of its own, so that none finds its inputs in the cache;
what is compared takes turns round by round. On a GPU a round is one CUDA graph between two events,
as `triton.testing.do_bench_cudagraph` has it: Python's time to launch is no part of the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvferry.bench.stats import interquartile

MIN_COPIES, MAX_COPIES = 2, 256
L2_MULTIPLE = 3
"""How often the inputs of a round fill the cache."""
MIN_ROUNDS, MAX_ROUNDS = 5, 200
ESTIMATE_ROUNDS = 3

ROUND_S = 1e-3
"""A round takes at least so long: its inputs are run through repeatedly, so that what starting it
costs the device does not count.
"""

Call = Callable[[], object]
Round = Callable[[int], float]
"""Runs all calls in order, the given number of times; returns the seconds of one time."""


class Timer(Protocol):
    """Knows how to run calls on a device and how long that took there."""

    def prepare(self, calls: Sequence[Call]) -> Round:
        """Run all once, unmeasured. Raises RuntimeError where the device cannot run them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one call."""

    seconds: float
    """The median."""
    spread: float
    """Distance of the quartiles, seconds."""
    rounds: int


@dataclass(frozen=True, slots=True)
class Contender:
    """What is timed: a prepared round and the number of its calls."""

    run: Round
    calls: int


def contender(timer: Timer, calls: Sequence[Call]) -> Contender:
    """Raises RuntimeError where the device cannot run the calls."""
    return Contender(timer.prepare(calls), len(calls))


def copies_beyond_l2(nbytes: int, l2_nbytes: int) -> int:
    """How many inputs of ``nbytes`` make a round that no cache holds.

    At least two: the same input twice in a row could be found where it was left. At most
    MAX_COPIES: tiny inputs stay cached, as they do in a model.
    """
    wanted = math.ceil(L2_MULTIPLE * l2_nbytes / max(1, nbytes))
    return max(MIN_COPIES, min(MAX_COPIES, wanted))


def measure(contenders: Mapping[str, Contender], budget_s: float) -> dict[str, Timing]:
    """Time per call of each contender, all within about ``budget_s`` of device time.

    The first round of each is not counted; the next ones tell how often a round repeats its calls
    and how many rounds there is time for.
    """
    repeats, cost = {}, 0.0
    for name, each in contenders.items():
        each.run(1)
        once = statistics.median(each.run(1) for _ in range(ESTIMATE_ROUNDS))
        repeats[name] = max(1, math.ceil(ROUND_S / once)) if once > 0 else 1
        cost += repeats[name] * once
    wanted = int(budget_s / cost) if cost > 0 else MAX_ROUNDS
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(max(MIN_ROUNDS, min(MAX_ROUNDS, wanted))):
        # Who goes first changes, so that a clock that drops meets all alike.
        names = list(contenders)
        if number % 2:
            names.reverse()
        for name in names:
            seconds = contenders[name].run(repeats[name])
            found[name].append(seconds / contenders[name].calls)
    return {
        name: Timing(
            seconds=statistics.median(times), spread=interquartile(times), rounds=len(times)
        )
        for name, times in found.items()
    }
