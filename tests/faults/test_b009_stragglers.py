"""B009: a transfer that never ends is ended, by default and by a short deadline; nobody else waits
for it, and what it held serves the next ones, however often that happens.
"""

from __future__ import annotations

import math
from random import Random

import pytest
from kv_sim.scripted import Script
from kv_sim.wire import Path
from kv_sim.world import PROGRESS_S

from kvferry.core.config import parse_config
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.wire import link_options

pytestmark = pytest.mark.slow

ROUNDS = 8
"""More than slabs on a link, and than links."""


def prompt(i: int) -> list[int]:
    return Random(i).choices(range(90), k=12)


@pytest.mark.parametrize("path", [Path.PUSHED, Path.PULLED])
def test_one_slab_of_many_never_arrives(path: Path) -> None:
    script = Script(paths=(path,), slab_bytes=256)
    world = script.world
    world.happened.add("slabs_stick")
    for i in range(ROUNDS):
        world.stickiness, world.sticky_until_s = 1.0, script.now + 60.0
        straggler = script.submit(prompt(100 + i))
        script.until(lambda so_far=i: world.stuck_slabs > so_far)
        world.sticky_until_s = 0.0
        others = [script.submit(prompt(4 * i + k)) for k in range(3)]
        # A link whose data path has swallowed a slab is opened again; then all go on.
        script.done(straggler, *others, within_s=4 * PROGRESS_S)
    script.reclaimed()
    script.finish()


def test_the_default_is_finite() -> None:
    options = link_options(parse_config({}), "secret", Incarnation(1))
    for name in ("progress_timeout_s", "silence_s", "beat_s"):
        assert 0 < getattr(options, name) < math.inf, name
    assert parse_config({}).transfer.lease_s < math.inf
