"""B004: pools with different block sizes are converted exactly; a difference that cannot be bridged
keeps a worker out, with the reason, and no text ever comes from half a hand-over.
"""

from __future__ import annotations

import pytest
import torch
from kv_sim.scripted import Script
from kv_sim.workers import Shape

pytestmark = pytest.mark.slow

SIZES = [(32, 16), (16, 24), (24, 16), (8, 32), (7, 5), (1, 40), (40, 1)]


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_any_two_sizes(prefill: int, decode: int) -> None:
    script = Script(
        prefill=(Shape("P0", True, prefill, max(3, 120 // prefill), 40, torch.float64),),
        decode=(Shape("D0", False, decode, max(3, 120 // decode), 40, torch.float32),),
    )
    # Lengths around the blocks of both, then again with what is cached by then.
    lengths = sorted(
        {1, 2, prefill - 1, prefill, prefill + 1, decode, decode + 1, 31} & {*range(1, 36)}
    )
    for _ in range(2):
        for length in lengths:
            script.done(script.submit([(3 * i) % 90 for i in range(length)], max_tokens=3))
    script.finish()


def test_a_hand_over_that_fails_yields_no_text() -> None:
    """The prefill worker is told another layout than the lease was made for."""
    script = Script()
    script.world.happened.add("leases_mixed_up")
    target = script.decode.target
    for changes in ({"num_layers": 3}, {"num_kv_heads": 2}, {"head_dim": 8}, {"dtype": "int3"}):

        def wrong(granted, changes=changes):
            made = target(granted)
            for name, value in changes.items():
                setattr(made.layout, name, value)
            return made

        script.decode.target = wrong
        request = script.submit(range(20), max_tokens=4)
        script.until(lambda r=request: r.outcome)
        assert request.outcome != "done", changes
        assert len(request.output) <= 6, "first tokens of attempts, none from the decode worker"
        assert request.output == request.expected[: len(request.output)]
        script.reclaimed()
    script.decode.target = target
    script.done(script.submit(range(20)))
    script.finish()
