"""B001: blocks of a transfer that nobody will ever finish come back by the decode worker's own
clock, however it was abandoned; what comes later is refused.
"""

from __future__ import annotations

import pytest
from kv_sim.scripted import RECLAIM_S, Script
from kv_sim.wire import Path

from kvferry.engine.sequences import State

pytestmark = pytest.mark.slow

ROUNDS = 20
"""More than the pool has room for."""
PUSHED = (Path.PUSHED,)


def receiving(script: Script) -> None:
    """No slab arrives from now on, and nobody is told."""
    script.world.happened.add("slabs_stick")
    script.world.sticky_until_s = 1e9
    script.world.stickiness = 1.0


def prompt(i: int) -> list[int]:
    return [(i + j) % 90 for j in range(30)]


@pytest.mark.parametrize("how", ["client", "prefill dies", "router dies", "silence"])
def test_the_pool_does_not_run_dry(how: str) -> None:
    script = Script(paths=PUSHED)
    world, start = script.world, script.decode.pool.num_free
    receiving(script)
    for i in range(ROUNDS):
        request = script.submit(prompt(i))
        script.until(lambda r=request: script.states(r)[1] is State.RESERVED)
        script.wait(0.05)
        assert script.decode.pool.counts().reserved
        match how:
            case "client":
                script.leave(request)
            case "prefill dies":
                world.happened.add("worker_dies")
                world.kill_worker("P0")
                script.leave(request)
            case "router dies":
                world.happened.add("router_dies")
                script.router.die()
                world.start_router()
            case "silence":
                # Nobody says anything any more: the lease alone ends it.
                world.happened.add("renewals_stop")
                script.router.renews = False
                lease_s = script.decode.sequences.lease_s
                script.until(lambda: not script.decode.pool.counts().reserved, lease_s + RECLAIM_S)
                script.leave(request)
                script.router.renews = True
        script.until(lambda: script.decode.pool.num_free == start, 2 * RECLAIM_S)
        script.until(world.is_whole)
    world.calm()
    script.done(script.submit(prompt(0)))
    script.finish()
