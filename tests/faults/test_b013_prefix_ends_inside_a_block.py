"""B013: a cached prefix ends inside a block, or a chunk, of the other side: what is shipped begins
at that very token, what is cached stays untouched, and the answer is that of a cold run.
"""

from __future__ import annotations

import pytest
import torch
from kv_sim.scripted import Script
from kv_sim.wire import Path
from kv_sim.workers import Shape

from kvferry.kv_transfer.jobs import ReceiveDone

pytestmark = pytest.mark.slow

PROMPT = [(5 * i + 3) % 90 for i in range(35)]
TOKEN_BYTES = 2 * 2 * 4 * 8
"""Two layers, keys and values, four float64."""


@pytest.mark.parametrize(("prefill", "decode"), [(4, 8), (8, 4), (16, 4), (3, 8), (4, 16)])
@pytest.mark.parametrize("chunk", [5, 40])
def test_every_length_of_what_is_cached(prefill: int, decode: int, chunk: int) -> None:
    shapes = {
        "prefill": (Shape("P0", True, prefill, 80 // prefill, chunk, torch.float64),),
        "decode": (Shape("D0", False, decode, 80 // decode, 40, torch.float64),),
    }
    for length in range(1, len(PROMPT), 3):
        script = Script(**shapes, paths=(Path.PUSHED, Path.SHARED), slab_bytes=1024)
        script.decode.wire = "float64"
        script.done(script.submit(PROMPT[:length], max_tokens=2))
        script.done(script.submit(PROMPT, max_tokens=3))
        found = [
            event for event in script.world.invariants.events if isinstance(event, ReceiveDone)
        ]
        first = length - length % decode
        # A block that decoding has filled is cached as well, but holds other tokens than these.
        shipped = [event.account.nbytes // TOKEN_BYTES for event in found]
        assert shipped[-1] == len(PROMPT) - first, (length, shipped)
        script.finish()
