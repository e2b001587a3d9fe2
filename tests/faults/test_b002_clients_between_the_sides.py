"""B002: a client that leaves when the prefill side is done and the decode side has not begun costs
the prefill worker nothing for longer than a message takes.
"""

from __future__ import annotations

from random import Random

import pytest
import torch
from kv_sim.scripted import Script
from kv_sim.wire import Path
from kv_sim.workers import Shape

from kvferry.engine.sequences import State

pytestmark = pytest.mark.slow

SMALL = (Shape("P0", True, 4, 10, 16, torch.float64),)
"""Room for one prompt of 30 tokens."""
ROUNDS = 30


def prompt(i: int) -> list[int]:
    return Random(i).choices(range(90), k=30)


@pytest.mark.parametrize("decode_waits", [False, True])
def test_clients_leave_between_prefill_and_decode(decode_waits: bool) -> None:
    """``decode_waits``: KV is under way and stays so."""
    script = Script(prefill=SMALL, paths=(Path.PUSHED,), tempo=3.0)
    start = script.prefill.pool.num_free
    if decode_waits:
        script.world.happened.add("slabs_stick")
        script.world.stickiness, script.world.sticky_until_s = 1.0, 1e9
    for i in range(ROUNDS):
        request = script.submit(prompt(i), max_tokens=5)
        script.until(lambda r=request: script.states(r)[0] is State.TRANSFERRING or r.output)
        script.leave(request)
        script.until(lambda: script.prefill.pool.num_free == start, 1.0)
    script.world.calm()
    script.done(script.submit(prompt(0)))
    script.finish()
