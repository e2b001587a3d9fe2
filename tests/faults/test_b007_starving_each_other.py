"""B007: sequences that each hold part of what the other needs do not wait for each other: one is
swapped, given back or never let in, and all of them end.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from kv_sim.scripted import Script
from kv_sim.workers import Shape
from pressure_rig import PressureRig

from kvferry.engine.sequences import State

pytestmark = pytest.mark.slow

PREFILL = (Shape("P0", True, 4, 20, 40, torch.float64),)


@pytest.mark.parametrize("blocks", [5, 6, 7, 8])
@pytest.mark.parametrize("growth", [1, 4, 16])
@pytest.mark.parametrize("order", [(16, 12), (12, 16), (15, 12, 12)])
def test_one_block_short(blocks: int, growth: int, order: tuple[int, ...]) -> None:
    """Blocks of 4: 16 tokens fill four and the next token needs a fifth; 12 fill three."""
    decode = (Shape("D0", False, 4, blocks, 40, torch.float64),)
    script = Script(prefill=PREFILL, decode=decode, growth_tokens=growth)
    requests = [
        script.submit([(11 * i + j) % 90 for j in range(length)], max_tokens=6)
        for i, length in enumerate(order)
    ]
    script.done(*requests, within_s=30.0)
    script.finish()


def test_whatever_arrives_together() -> None:
    lengths = (4, 8, 11, 12, 13, 16)
    decode = (Shape("D0", False, 4, 7, 40, torch.float64),)
    for order in itertools.combinations(lengths, 3):
        script = Script(prefill=PREFILL, decode=decode, growth_tokens=1)
        requests = [
            script.submit([(11 * i + j) % 90 for j in range(length)], max_tokens=5)
            for i, length in enumerate(order)
        ]
        script.done(*requests, within_s=30.0)
        script.finish()


@pytest.mark.parametrize("slots", [0, 2, 40])
def test_the_oldest_goes_on_whatever_meets_at_the_last_block(slots: int) -> None:
    """Two or three that fill the pool at the same step, in host memory or given back."""
    for lengths in itertools.product((4, 15, 16, 17), repeat=2):
        for extra in ((), (12,)):
            rig = PressureRig(16, slots, growth_tokens=1)
            requests = [
                rig.submit([i, *range(30, 29 + length)], 60 - length)
                for i, length in enumerate((*lengths, *extra))
            ]
            while any(not request.outcome for request in requests):
                oldest = next(request for request in requests if not request.outcome)
                before = sum(oldest.computed.values())
                waits = rig.state(oldest) in (None, State.WAITING, State.RESERVED)
                # Others' blocks are free for it after the step that moves them.
                stepped = [rig.turn() for _ in range(2)]
                assert waits or (any(stepped) and sum(oldest.computed.values()) > before)
                rig.check()
            rig.check_end()
            assert requests[0].given_back == 0
