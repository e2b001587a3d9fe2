"""The timing method, under a timer that says what each call takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from kernel_bench import FakeTimer

from kvferry.bench.kernel_timing import (
    MAX_COPIES,
    MAX_ROUNDS,
    MIN_COPIES,
    MIN_ROUNDS,
    ROUND_S,
    Contender,
    Timing,
    contender,
    copies_beyond_l2,
    measure,
)

MIB = 1 << 20


def nothing() -> None:
    return


def timed(timer: FakeTimer, calls: int, budget_s: float = 1.0) -> Timing:
    return measure({"it": contender(timer, [nothing] * calls)}, budget_s)["it"]


@pytest.mark.parametrize("nbytes", [1, 100, MIB, 49 * MIB, 51 * MIB, 1 << 33])
def test_a_round_is_larger_than_the_cache(nbytes: int) -> None:
    copies = copies_beyond_l2(nbytes, 50 * MIB)
    assert MIN_COPIES <= copies <= MAX_COPIES
    assert copies * nbytes > 2 * 50 * MIB or copies == MAX_COPIES


def test_nothing_to_read_still_has_copies() -> None:
    assert copies_beyond_l2(0, 50 * MIB) == MAX_COPIES


@pytest.mark.parametrize("calls", [1, 2, 7])
def test_the_time_is_of_one_call(calls: int) -> None:
    found = timed(FakeTimer(lambda call: 3e-4), calls)
    assert found.seconds == pytest.approx(3e-4)
    assert found.spread == pytest.approx(0.0)


def test_the_median_ignores_outliers() -> None:
    draw = random.Random(0)
    timer = FakeTimer(lambda call: 1e-3 if draw.random() < 0.8 else 1.0)
    assert timed(timer, 1, budget_s=100.0).seconds == pytest.approx(1e-3)


def test_starting_a_round_does_not_count() -> None:
    """A call of 2 µs under a start of 20 µs: repeated until the start is a few per cent."""
    found = timed(FakeTimer(lambda call: 2e-6, overhead=2e-5), 2)
    assert found.seconds == pytest.approx(2e-6, rel=0.25)


def test_short_rounds_are_repeated_and_long_ones_are_not() -> None:
    short, long = FakeTimer(lambda call: 1e-5), FakeTimer(lambda call: 1.0)
    timed(short, 2)
    timed(long, 2)
    assert short.rounds[-1][1] == pytest.approx(ROUND_S / 2e-5, abs=1)
    assert long.rounds[-1][1] == 1


@pytest.mark.parametrize("seconds", [1e-7, 1e-5, 1e-3, 0.1, 10.0])
def test_rounds_fit_the_budget(seconds: float) -> None:
    found = timed(FakeTimer(lambda call: seconds), 1, budget_s=0.5)
    assert MIN_ROUNDS <= found.rounds <= MAX_ROUNDS
    if found.rounds > MIN_ROUNDS:
        assert found.rounds * max(seconds, ROUND_S) <= 0.5 * 1.01


def test_a_clock_that_reads_zero_is_survived() -> None:
    assert timed(FakeTimer(lambda call: 0.0), 1).seconds == 0.0


def test_contenders_take_turns_and_change_who_goes_first() -> None:
    order: list[str] = []

    def named(name: str) -> Contender:
        def a_round(repeats: int) -> float:
            order.append(name)
            return 1.0

        return Contender(a_round, 1)

    measure({"a": named("a"), "b": named("b")}, budget_s=8.0)
    counted = "".join(order[-2 * MIN_ROUNDS :])
    assert counted.startswith("abbaabba")


def test_a_clock_that_drops_meets_all_alike() -> None:
    """Both take the same, in a device that slows down steadily: neither looks faster."""
    clock = [1e-3]

    def slowing(_: Callable[[], object]) -> float:
        clock[0] *= 1.001
        return clock[0]

    timer = FakeTimer(slowing)
    pair = {name: contender(timer, [nothing]) for name in ("a", "b")}
    found = measure(pair, budget_s=0.2)
    assert found["a"].seconds == pytest.approx(found["b"].seconds, rel=2e-3)
