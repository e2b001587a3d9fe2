"""Trouble at the worst moment: while a slab is packed, in flight or scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kv_sim.faults import blocks_given_away_of, client_leaves, in_transfer, leave
from kv_sim.workers import PrefillSide, Worker
from kvferry.kv_transfer.jobs import BlockTable

if TYPE_CHECKING:
    from kv_sim.world import World

LONG_S = 0.4
CROWD = 2
"""Requests that come at once, for the blocks that become free."""


class Meddling:
    """``chance``: how often a copy or a flight takes long and is meddled with."""

    def __init__(self, world: World, chance: float) -> None:
        self._world = world
        self.chance = chance

    def in_copy(self, worker: Worker, blocks: BlockTable) -> float:
        """A pack or a scatter begins: seconds that it takes longer."""
        draw = self._world.random
        if draw.random() >= self.chance:
            return 0.0
        seq = next((s for s in worker.sequences if s.blocks == blocks.block_ids.tolist()), None)
        self._world.happened.add("meddling")
        self._later(0.02, self._disturb, worker, seq and seq.key)
        return LONG_S * draw.random()

    def in_flight(self) -> float:
        """A slab leaves: seconds that it takes longer."""
        draw = self._world.random
        if draw.random() >= self.chance:
            return 0.0
        self._world.happened.add("meddling")
        self._later(0.02, self._world.happen, client_leaves)
        self._crowd()
        return LONG_S * draw.random()

    def _disturb(self, worker: Worker, key) -> None:
        world, draw = self._world, self._world.random
        seq = None if key is None else worker.sequences.get(key)
        actions = ["link", "session"]
        if seq is not None:
            actions += ["client", "client"]
            if isinstance(worker, PrefillSide) and in_transfer(worker, seq):
                actions += ["away", "away"]
        action = draw.choice(actions)
        kind = "packed" if isinstance(worker, PrefillSide) else "scattered"
        world.covered[f"{action} while a slab is {kind}"] += 1
        world.note("meddling: %s while %s %s", action, worker.name, kind)
        if action == "client":
            world.happened.add("client_leaves")
            leave(world, key.request)
        elif action == "away":
            world.happened.add("blocks_given_away")
            blocks_given_away_of(worker, seq)
        elif action == "link":
            world.happened.add("link_breaks")
            worker.cut_links()
        elif action == "session":
            world.happened.add("session_breaks")
            for router in world.routers:
                for session in [s for s in router.sessions if s.worker is worker]:
                    session.cut()
        self._crowd()

    def _crowd(self) -> None:
        for _ in range(self._world.random.randint(0, CROWD)):
            if self._world.crowd_left:
                self._world.crowd_left -= 1
                self._later(0.05, self._world.arrive)

    def _later(self, most_s: float, call, *arguments) -> None:
        agenda = self._world.agenda
        agenda.after(most_s * self._world.random.random(), call, *arguments)
