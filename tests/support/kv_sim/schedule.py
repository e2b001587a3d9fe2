"""One random schedule, from its seed to the verdict on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kv_sim.clock import Hang
from kv_sim.defects import Defect
from kv_sim.faults import WEIGHTS, wire_goes_bad
from kv_sim.world import World

FAULTY_S = 2.0
"""Faults happen before this."""
LONGEST_S = 30.0
"""All must be at rest by then, however bad it was."""
DEFECTS = {"blocks_given_away", "leases_mixed_up"}
"""Defects of this side, which may leave a request to its deadline."""
PATIENCE_S = 45.0
CHECK_S = 0.2
NUM_PROBES = 1
PROBED = 0.6
"""Of the schedules with faults."""
NUM_REQUESTS = (1, 2, 2, 3)
NUM_FAULTS = (0, 1, 2, 3, 4, 7)
MEDDLING = (0.0, 0.0, 0.05, 0.2)
"""Chance that a copy or a flight is meddled with."""


@dataclass(slots=True)
class Result:
    """What came of a schedule."""

    seed: int
    violations: list[str] = field(default_factory=list)
    hang: str = ""
    leak: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    covered: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)
    wrong_tokens: int = 0
    leaked: int = 0
    """Blocks held at the end by nobody who may."""

    @property
    def failed(self) -> bool:
        return bool(self.violations or self.hang or self.leak)

    @property
    def broken_rules(self) -> int:
        return len(self.violations) - self.wrong_tokens


def run_schedule(seed: int, *, trace: bool = False, defect: Defect = Defect.NONE) -> Result:
    """Never raises for what a schedule finds."""
    result = Result(seed)
    world = World(seed, trace=trace, defect=defect)
    try:
        _play(world, result)
    except Hang as error:
        result.hang = str(error)
    result.violations = world.violations
    result.wrong_tokens = world.wrong_tokens
    if result.leak:
        result.leaked = world.invariants.held_blocks()
        result.hang = result.hang or ("" if result.leaked else result.leak)
    result.covered = world.covered
    result.trace = world.trace or []
    return result


def _play(world: World, result: Result) -> None:
    draw, agenda = world.random, world.agenda
    agenda.after(0.0, world.invariants.watch)
    for _ in range(draw.choice(NUM_REQUESTS)):
        agenda.at(draw.random() * FAULTY_S / 2, world.arrive)
    faults, weights = list(WEIGHTS), list(WEIGHTS.values())
    num_faults = draw.choice(NUM_FAULTS)
    drawn = draw.choices(faults, weights, k=num_faults)
    world.wires_may_go_bad = wire_goes_bad in drawn
    for fault in drawn:
        agenda.at(draw.random() ** 2 * FAULTY_S, world.happen, fault)
    if num_faults:
        world.meddling.chance = draw.choice(MEDDLING)
    agenda.pass_time(FAULTY_S / 2)
    result.leak = _rest(world)
    if result.leak:
        return
    if num_faults:
        agenda.pass_time(max(0.0, FAULTY_S - agenda.now))
    if num_faults and draw.random() < PROBED:
        _probe(world, result)
    world.invariants.check_end()
    for request in world.requests():
        if not num_faults and request.outcome not in ("done", "deadline"):
            world.violation(f"request {request.number}: {request.outcome} without any fault")
        result.outcomes[request.outcome.split(":")[0]] += 1


def _rest(world: World) -> str:
    """Let all come to rest; why it does not, or nothing."""
    agenda = world.agenda
    while why := world.invariants.at_rest():
        if agenda.now > (PATIENCE_S if world.happened & DEFECTS else LONGEST_S):
            return why
        agenda.pass_time(CHECK_S)
    return ""


def _probe(world: World, result: Result) -> None:
    """With all faults over, requests run as if nothing had been: B005, B006."""
    world.calm()
    while not world.is_whole():
        world.agenda.pass_time(CHECK_S)
    probes = [world.draw_request(patient=True) for _ in range(NUM_PROBES)]
    for probe in probes:
        world.submit(probe)
    world.agenda.pass_time(CHECK_S)
    result.leak = _rest(world)
    for probe in probes:
        if probe.outcome != "done" or probe.attempt > 2:
            world.violation(
                f"probe {probe.number}: {probe.outcome} at attempt {probe.attempt}, all faults over"
            )
