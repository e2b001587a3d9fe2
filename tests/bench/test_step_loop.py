"""The loop's traffic: what is timed is a full worker, whose ended requests are replaced."""

from __future__ import annotations

import pytest

from kvferry.bench.step_loop import LoopSizes, measure_loop


@pytest.mark.parametrize("stop_ids", [False, True])
def test_the_worker_stays_full(stop_ids: bool) -> None:
    sizes = LoopSizes(running=8, prompt_len=20, max_tokens=4, steps=40, stop_ids=stop_ids)
    times = measure_loop(sizes)
    assert times.arrivals > sizes.steps
    assert sizes.running <= times.mean_sequences <= sizes.live
    assert times.wall_ms > 0
    assert times.cpu_ms > 0
