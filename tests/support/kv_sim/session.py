"""The session between a router and a worker: two ordered directions with delays, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.core.ids import Incarnation
from kvferry.engine.ports import FromRouter, SessionClosed, SessionOpened
from kvferry.proto import worker_pb2 as pb

if TYPE_CHECKING:
    from kv_sim.router import Router
    from kv_sim.workers import Worker
    from kv_sim.world import World


class Direction:
    """Delivers in order, each thing at its own time, until cut."""

    def __init__(self, world: World, deliver: Callable[[Any], None]) -> None:
        self._world = world
        self._deliver = deliver
        self._last_s = 0.0
        self.cut = False

    def send(self, thing: Any) -> None:
        if not self.cut:
            when = max(self._last_s, self._world.agenda.now + self._world.pace.session_s())
            self._last_s = when
            self._world.agenda.at(when, self._arrive, thing)

    def hold(self, until_s: float) -> None:
        """What is sent from now on arrives later."""
        self._last_s = max(self._last_s, until_s)

    def _arrive(self, thing: Any) -> None:
        if not self.cut:
            self._deliver(thing)


class Session:
    """Opened when made. It is also the worker's port to its router."""

    def __init__(self, world: World, router: Router, worker: Worker) -> None:
        self.world, self.router, self.worker = world, router, worker
        self.incarnation: Incarnation = router.incarnation
        self.routable = False
        self.held_until_s = 0.0
        self.worker_knows = False
        """That it is closed."""
        self._down = Direction(world, self._at_worker)
        self._up = Direction(world, self._at_router)
        self.closed = False
        router.sessions.append(self)
        self._down.send(SessionOpened(self))

    def send(self, message: pb.WorkerMessage) -> None:
        """What the worker's step loop says."""
        self.world.heard(self.worker, message)
        self._up.send(message)

    def to_worker(self, message: pb.RouterMessage) -> None:
        self._down.send(FromRouter(self, message))

    def hold(self, until_s: float) -> None:
        """Nothing passes before then."""
        self._down.hold(until_s)
        self._up.hold(until_s)
        self.held_until_s = max(self.held_until_s, until_s)

    def cut(self) -> None:
        """The connection breaks; both ends hear of it, each in its own time."""
        if self.closed:
            return
        self.closed = True
        self.world.note("session %s - %s cut", self.router.incarnation, self.worker.name)
        self._up.cut = self._down.cut = True
        pace = self.world.pace
        self.world.agenda.after(pace.notice_s(), self._at_worker, SessionClosed(self))
        self.world.agenda.after(pace.notice_s(), self._router_hears)

    def _at_router(self, message: pb.WorkerMessage) -> None:
        self.routable = True
        self.router.hear(self, message)

    def _at_worker(self, event: object) -> None:
        if isinstance(event, SessionClosed):
            self.worker_knows = True
        if not self.worker.dead:
            self.worker.post(event)

    def _router_hears(self) -> None:
        self.routable = False
        if not self.router.dead:
            self.router.lost(self)
            self.world.reconnect(self.router, self.worker)
