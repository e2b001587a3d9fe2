"""The loop's traffic: what is timed is a full worker, whose ended requests are replaced."""

from __future__ import annotations

import pytest

from kvferry.bench.step_gap import STEPS_PER_TURN, gap_claim, gap_rows, measure_gap
from kvferry.bench.step_loop import LoopSizes, measure_loop


@pytest.mark.parametrize("stop_ids", [False, True])
def test_the_worker_stays_full(stop_ids: bool) -> None:
    sizes = LoopSizes(running=8, prompt_len=20, max_tokens=4, steps=40, stop_ids=stop_ids)
    times = measure_loop(sizes)
    assert times.arrivals > sizes.steps
    assert sizes.running <= times.mean_sequences <= sizes.live
    assert times.wall_ms > 0
    assert times.cpu_ms > 0


def test_gaps_are_those_of_steps_that_were_planned_ahead_and_of_others() -> None:
    times = measure_gap(running=3, steps=STEPS_PER_TURN + 1)
    assert len(times.ahead) == len(times.after) == 2 * STEPS_PER_TURN
    assert all(ms > 0 for ms in [*times.ahead, *times.after])
    claim, rows = gap_claim(3, times), gap_rows(3, times)
    assert (claim.id, claim.goal) == ("loop_gap_ms_3", None)
    assert claim.value == rows[0]["gap ms"]
