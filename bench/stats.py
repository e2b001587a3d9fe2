"""Medians, spreads and paired comparisons."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BOOTSTRAP_ROUNDS = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the range that holds it with the given confidence."""

    median: float
    low: float
    high: float
    n: int

    @property
    def spread(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def interquartile(values: Sequence[float]) -> float:
    """Distance between the first and third quartile; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def bootstrap_median(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """The median of ``values`` with a percentile bootstrap interval. Raises ValueError on none."""
    if not values:
        raise ValueError("no values to take a median of")
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAP_ROUNDS)
    )
    tail = (1 - confidence) / 2
    low = medians[int(tail * (BOOTSTRAP_ROUNDS - 1))]
    high = medians[int((1 - tail) * (BOOTSTRAP_ROUNDS - 1))]
    return Interval(statistics.median(values), low, high, len(values))


def interleaved_pairs(
    measure: Callable[[], float], baseline: Callable[[], float], pairs: int
) -> tuple[list[float], list[float]]:
    """Measure both in turn, changing which goes first, so that drift meets both alike.

    Returns the values of ``measure`` and of ``baseline``, pair by pair.
    """
    measured, compared = [], []
    for number in range(pairs):
        if number % 2:
            compared.append(baseline())
            measured.append(measure())
        else:
            measured.append(measure())
            compared.append(baseline())
    return measured, compared


def paired_ratio(measured: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The median of the per-pair ratios ``measured / baseline`` with its interval."""
    ratios = [ours / theirs for ours, theirs in zip(measured, baseline, strict=True)]
    return bootstrap_median(ratios)
