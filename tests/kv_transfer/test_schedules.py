"""Random schedules of the whole hand-off on a virtual clock: whatever goes wrong, and however it
falls together, no token is wrong, no block is lost, nothing hangs.

``tests/support/kv_sim`` is the simulator; docs/faults.md says what it checks.
"""

from __future__ import annotations

import logging

import pytest
from kv_sim.defects import Defect
from kv_sim.schedule import run_schedule
from kv_sim.soak import Tally, play, report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCHEDULES = 10_000
COVERED = [
    "cancelled while waiting on D",
    "cancelled while reserved on D",
    "cancelled while decoding on D",
    "cancelled while prefilling on P",
    "cancelled while transferring on P",
    "killed while reserved on D",
    "killed while decoding on D",
    "killed while prefilling on P",
    "killed while transferring on P",
    "blocks given away while transferring on P",
    "blocks given away while reserved on D",
    "a slab that is filled is followed",
    "a slab that is not filled is followed",
    "a slab that is sealed is followed",
    "client while a slab is packed",
    "client while a slab is scattered",
    "away while a slab is packed",
    "link while a slab is packed",
    "link while a slab is scattered",
    "session while a slab is scattered",
]


def test_random_schedules(
    request: pytest.FixtureRequest, seeded: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """B001, B002, B005, B006, B007, B009 and the stale-block fault, among others."""
    alone = request.config.option.schedule_seed
    if alone is not None:
        result = run_schedule(alone)
        assert not result.failed, report(result)
        return
    tally = play(seeded, lambda so_far: so_far.schedules < SCHEDULES)
    with capsys.disabled():
        print(f"\n{tally}")
    assert not tally.failures, report(tally.failures[0])
    _check_covered(tally)


def _check_covered(tally: Tally) -> None:
    """What is rare enough never to happen is not tested."""
    missing = [what for what in COVERED if tally.covered[what] < 10]
    assert not missing, tally.covered


@pytest.mark.parametrize("defect", [defect for defect in Defect if defect is not Defect.NONE])
def test_schedules_find_defects(defect: Defect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # steps fail on wrong KV
    found = (seed for seed in range(3000) if run_schedule(seed, defect=defect).failed)
    assert next(found, None) is not None


def test_a_schedule_is_the_same_each_time() -> None:
    for seed in range(20):
        assert run_schedule(seed, trace=True).trace == run_schedule(seed, trace=True).trace
