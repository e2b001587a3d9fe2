"""B005: what times out is swept on every turn of the loop, whether or not there is new work: a pool
full of transfers that nobody waits for heals by itself, and a short probe runs.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from kv_sim.scripted import RECLAIM_S, Script
from kv_sim.wire import Path
from kv_sim.workers import LEASE_S, Shape

pytestmark = pytest.mark.slow

LARGE = (Shape("D0", False, 4, 80, 40, torch.float64),)
SMALL = (Shape("P0", True, 4, 20, 40, torch.float64),)


@pytest.mark.parametrize("cancels_arrive", [True, False])
def test_bursts_of_long_prompts_cancelled_in_their_transfers(cancels_arrive: bool) -> None:
    script = Script(prefill=SMALL, decode=LARGE, paths=(Path.PUSHED,))
    world = script.world
    world.happened |= {"slabs_stick", "renewals_stop"}
    world.sticky_until_s, world.stickiness = 1e9, 1.0
    for round_number in range(5):
        requests = [
            script.submit(Random(12 * round_number + i).choices(range(90), k=30)) for i in range(12)
        ]
        script.until(lambda: script.prefill.pool.num_free < 8)
        script.wait(0.1)
        if cancels_arrive:
            for request in requests:
                script.leave(request)
            script.reclaimed(RECLAIM_S)
        else:
            # The router has stopped: nothing comes any more but the workers' own clocks.
            for session in script.router.sessions:
                session.hold(script.now + 2 * LEASE_S)
            script.reclaimed(LEASE_S + RECLAIM_S)
            for request in requests:
                script.leave(request)
            script.wait(2 * LEASE_S)
    world.calm()
    script.done(script.submit([1, 2, 3]), within_s=2.0)
    script.finish()
