"""B006: nothing of a worker outlives it in another one: after a restart, at the same address or
another, the next request goes through at its first attempt.
"""

from __future__ import annotations

import pytest
from kv_sim.scripted import Script

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("worker", ["P0", "D0"])
@pytest.mark.parametrize("noticed", [True, False])
def test_the_next_request_after_a_restart(worker: str, noticed: bool) -> None:
    """``noticed``: the link was seen to break before the next request, or it is still thought to
    be up, as after the loss of a whole host.
    """
    script = Script()
    world = script.world
    world.happened.add("worker_dies")
    for i in range(6):
        script.done(script.submit([(i + j) % 90 for j in range(20)]))
        if not noticed:
            world.silent_deaths = True
        world.kill_worker(worker)
        script.until(lambda: not world.is_whole(), 5.0)
        script.until(world.is_whole, 5.0)
        request = script.submit([(7 * i + j) % 90 for j in range(20)])
        script.done(request)
        assert request.attempt == 1
    script.finish()
