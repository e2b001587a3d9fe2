"""What can go wrong, each as one function of the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_sim.workers import DecodeSide, PrefillSide, Worker
from kvferry.engine.sequences import State, WorkerSequence
from kvferry.kv_transfer.transports.faults import FAULTS_AT, Chances, Fault, Place

if TYPE_CHECKING:
    from kv_sim.router import Router
    from kv_sim.world import World

Happening = Callable[["World"], None]


def client_leaves(world: World) -> None:
    waiting = [r for r in world.requests() if not r.outcome]
    if not waiting:
        return
    leave(world, world.random.choice(waiting).number)


def leave(world: World, number: int) -> None:
    """The client of one request is gone."""
    for worker in world.live_workers():
        for seq in worker.sequences:
            if seq.key.request == number:
                world.covered[f"cancelled while {seq.state} on {worker.shape.name[0]}"] += 1
    world.note("client of request %d leaves", number)
    for router in world.routers:
        router.cancel(number)


def renewals_stop(world: World) -> None:
    """A router forgets its leases for a while."""
    router = world.random.choice(world.routers)
    router.renews = False
    world.note("router %d renews nothing", router.incarnation)
    world.agenda.after(7.0 * world.random.random(), _renews_again, router)


def _renews_again(router: Router) -> None:
    router.renews = True


def router_pauses(world: World) -> None:
    """SIGSTOP, and SIGCONT later: nothing goes to it or comes from it."""
    router = world.random.choice(world.routers)
    until_s = world.agenda.now + 8.0 * world.random.random()
    world.note("router %d stops until %.2f", router.incarnation, until_s)
    for session in router.sessions:
        session.hold(until_s)


def leases_mixed_up(world: World) -> None:
    """A defect of a router: from now on, for a while, it may name the lease of another request."""
    world.mixed_up_until_s = world.agenda.now + world.random.random()


def session_breaks(world: World) -> None:
    sessions = [session for router in world.routers for session in router.sessions]
    if sessions:
        world.random.choice(sessions).cut()


def router_dies(world: World) -> None:
    alive = [router for router in world.routers if not router.dead]
    if len(alive) > 1 or world.random.random() < 0.3:
        router = world.random.choice(alive)
        world.note("router %d dies", router.incarnation)
        router.die()
        world.start_router()


def worker_dies(world: World) -> None:
    worker = _some_worker(world)
    if worker is not None:
        for seq in worker.sequences:
            world.covered[f"killed while {seq.state} on {worker.shape.name[0]}"] += 1
        world.kill_worker(worker.shape.name)


def worker_pauses(world: World) -> None:
    """SIGSTOP, and SIGCONT later."""
    worker = _some_worker(world)
    if worker is not None:
        seconds = 6.0 * world.random.random()
        world.note("%s stops for %.2f s", worker.name, seconds)
        worker.pause(seconds)


def link_breaks(world: World) -> None:
    links = [link for worker in _prefill(world) for link in worker.sending.open_links()]
    if links:
        link = world.random.choice(links)
        world.note("%s breaks", link.name)
        link.cut()


def all_is_slow(world: World) -> None:
    """Every duration may be long, for a while."""
    world.pace.slowness = 0.3 * world.random.random()
    world.agenda.after(2.0 * world.random.random(), _usual_pace, world)


def _usual_pace(world: World) -> None:
    world.pace.slowness = 0.0


def wire_goes_bad(world: World) -> None:
    """For a while, links lose, double, reorder, damage and replay what they carry, or die."""
    draw = world.random
    chance = draw.choice((0.02, 0.1, 0.3))
    among = draw.choice((list(Fault), FAULTS_AT[Place.PUSH], FAULTS_AT[Place.SEND]))
    kinds = draw.sample(among, k=draw.randint(1, 3))
    world.chances = Chances(dict.fromkeys(kinds, chance))
    world.bad_until_s = world.agenda.now + 2.0 * draw.random()
    world.note("wires go bad: %s", ", ".join(kinds))


def slabs_stick(world: World) -> None:
    """For a while, some slabs that leave never arrive."""
    world.sticky_until_s = world.agenda.now + world.random.random()
    world.note("slabs stick")


def blocks_given_away(world: World) -> None:
    """The stale-block fault: a defect gives blocks back that a transfer still reads or writes."""
    found = [
        (worker, seq)
        for worker in world.live_workers()
        for seq in worker.sequences
        if in_transfer(worker, seq)
    ]
    if not found:
        return
    worker, seq = world.random.choice(found)
    blocks_given_away_of(worker, seq)
    for _ in range(2):
        world.arrive()


def blocks_given_away_of(worker: Worker, seq: WorkerSequence) -> None:
    world = worker.world
    world.covered[f"blocks given away while {seq.state} on {worker.shape.name[0]}"] += 1
    world.note("%s gives the blocks of %s away", worker.name, seq.key)
    world.invariants.forget(worker, seq.key)
    if isinstance(worker, DecodeSide):
        # As if they were another sequence's already: nothing may be written there any more.
        worker.pool.generations[seq.blocks[seq.published :]] += 1
    worker.sequences.close(seq)
    worker.thread.wake()


def in_transfer(worker: Worker, seq: WorkerSequence) -> bool:
    if worker.thread.busy:
        return False
    if isinstance(worker, DecodeSide):
        return (
            seq.state is State.RESERVED and not seq.verified and not worker.receiving.is_copying()
        )
    return seq.state is State.TRANSFERRING


def _some_worker(world: World) -> Worker | None:
    alive = world.live_workers()
    return world.random.choice(alive) if alive else None


def _prefill(world: World) -> list[PrefillSide]:
    return [worker for worker in world.live_workers() if isinstance(worker, PrefillSide)]


WEIGHTS: dict[Happening, float] = {
    client_leaves: 5.0,
    renewals_stop: 1.0,
    router_pauses: 1.5,
    leases_mixed_up: 0.5,
    session_breaks: 1.0,
    router_dies: 0.5,
    worker_dies: 1.0,
    worker_pauses: 1.0,
    link_breaks: 2.0,
    all_is_slow: 1.5,
    wire_goes_bad: 4.0,
    slabs_stick: 1.0,
    blocks_given_away: 2.5,
}
