"""One simulated cluster: prefill and decode workers, routers, and all between them."""

from __future__ import annotations

import traceback
from collections import Counter
from random import Random
from typing import Any

from fake_engine_model import VOCAB_SIZE

from kv_sim.clock import Agenda
from kv_sim.defects import Defect
from kv_sim.faults import Happening
from kv_sim.invariants import Invariants
from kv_sim.meddling import Meddling
from kv_sim.pace import Pace
from kv_sim.router import Request, Router
from kv_sim.session import Session
from kv_sim.setup import Setup, draw_setup
from kv_sim.wire import SimChannel
from kv_sim.workers import DecodeSide, PrefillSide, Shape, Worker
from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.transports.faults import Chances, Fault, Faults, LinkFaults, Point, Side
from kvferry.kv_transfer.transports.faulty import FaultyChannel
from kvferry.proto import worker_pb2 as pb

BEAT_S = 1.0
SILENCE_S = 3.0
PROGRESS_S = 1.5
RESTART_S = 0.3


class World:
    """Everything random in it is drawn from one seed."""

    def __init__(
        self,
        seed: int,
        *,
        trace: bool = False,
        setup: Setup | None = None,
        defect: Defect = Defect.NONE,
    ) -> None:
        self.seed = seed
        self.defect = defect
        self.random = Random(seed)
        self.agenda = Agenda()
        self.agenda.defect = self._defect
        self.pace = Pace(self.random)
        self.trace: list[str] | None = [] if trace else None
        self.violations: list[str] = []
        self.wrong_tokens = 0
        self.covered: Counter[str] = Counter()
        self.closing = False
        self.happened: set[str] = set()
        """Names of the faults so far."""
        self.crowd_left = 3
        self.wires_may_go_bad = False
        self.invariants = Invariants(self)
        draw = self.random
        self.setup = setup or draw_setup(draw)
        self.pace.tempo = self.setup.tempo
        self.meddling = Meddling(self, 0.0)
        self.bad_until_s = self.sticky_until_s = self.mixed_up_until_s = 0.0
        self.stickiness = 0.2
        self.stuck_slabs = 0
        self.silent_deaths = False
        """Nobody is told when a worker dies, as when its host is gone."""
        self.chances = Chances({})
        self.faults = Faults(
            self._bad_wire, seed=seed, clock=self.agenda.clock, delay_s=self.setup.delay_s
        )
        self._incarnations = 0
        self.workers: dict[str, Worker] = {}
        self.all_workers: list[Worker] = []
        """All lives of all."""
        self.routers: list[Router] = []
        for shape in self.setup.shapes:
            self.start_worker(shape)
        for _ in range(self.setup.num_routers):
            self.start_router()
        self._streams = [
            [draw.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(draw.randint(1, 3))
        ]
        self._requests = 0

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def options(self, worker: Worker) -> LinkOptions:
        return LinkOptions(
            secret=b"s" * 32,
            incarnation=worker.incarnation,
            progress_timeout_s=PROGRESS_S,
            beat_s=BEAT_S,
            silence_s=SILENCE_S,
            slab_bytes=self.setup.slab_bytes,
            staging_bytes=self.setup.slab_bytes * self.setup.num_slabs,
        )

    def start_worker(self, shape: Shape) -> None:
        kind = PrefillSide if shape.is_prefill else DecodeSide
        worker = self.workers[shape.name] = kind(self, shape, self.next_incarnation())
        self.all_workers.append(worker)
        for router in self.routers:
            self.reconnect(router, worker)

    def kill_worker(self, name: str) -> None:
        """kill -9, and another life of it after a while."""
        worker = self.workers[name]
        if worker.dead:
            return
        self.note("%s is killed", worker.name)
        worker.kill()
        for router in self.routers:
            for session in [s for s in router.sessions if s.worker is worker]:
                session.cut()
        for other in self.workers.values():
            if not self.silent_deaths:
                other.peer_died(worker)
        self.agenda.after(RESTART_S * self.random.random(), self.start_worker, worker.shape)

    def start_router(self) -> None:
        router = Router(self, 1000 + self.next_incarnation())
        self.routers.append(router)
        for worker in self.workers.values():
            self.reconnect(router, worker)

    def reconnect(self, router: Router, worker: Worker) -> None:
        """A new session, unless one of both is gone."""
        if not router.dead and not worker.dead:
            Session(self, router, worker)

    def live_workers(self, *, prefill: bool | None = None) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if not worker.dead and prefill in (None, worker.is_prefill)
        ]

    def worker_of(self, incarnation: Incarnation) -> Worker | None:
        for worker in self.workers.values():
            if worker.incarnation == incarnation and not worker.dead:
                return worker
        return None

    def draw_request(self, *, patient: bool = False) -> Request:
        """Prompts share beginnings, so that both sides find blocks of earlier ones."""
        draw = self.random
        stream = draw.choice(self._streams)
        prompt = stream[: draw.randint(1, 22)]
        prompt += [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((0, 0, 1, 3, 6)))]
        self._requests += 1
        wait_s = 60.0 if patient else draw.choice((0.2, 2.0, 30.0, 30.0))
        return Request(
            number=self._requests,
            prompt=prompt,
            max_tokens=draw.choice((1, 2, 2, 3, 5)),
            deadline_s=self.agenda.now + wait_s,
            local=draw.random() < 0.1,
        )

    def happen(self, fault: Happening) -> None:
        self.happened.add(fault.__name__)
        fault(self)

    def arrive(self) -> None:
        self.submit(self.draw_request())

    def submit(self, request: Request) -> None:
        alive = [router for router in self.routers if not router.dead]
        if alive:
            self.note(
                "request %d: %d tokens and %d more%s",
                request.number,
                len(request.prompt),
                request.max_tokens,
                ", local" if request.local else "",
            )
            self.random.choice(alive).submit(request)

    def calm(self) -> None:
        """No fault from now on."""
        self.meddling.chance = 0.0
        self.bad_until_s = self.sticky_until_s = self.mixed_up_until_s = 0.0
        self.pace.slowness = 0.0
        for router in self.routers:
            router.renews = True

    def is_whole(self) -> bool:
        """Whether all workers run and every router has a session with each."""
        workers = self.live_workers()
        return len(workers) == len(self.setup.shapes) and not any(
            worker.paused or not router.is_up_with(workers)
            for router in self.routers
            if not router.dead
            for worker in workers
        )

    def slab_sticks(self) -> bool:
        """Whether a slab that leaves now never arrives, and nobody is told."""
        if self.agenda.now >= self.sticky_until_s or self.random.random() >= self.stickiness:
            return False
        self.stuck_slabs += 1
        return True

    def wrap(self, channel: SimChannel, side: Side) -> SimChannel | FaultyChannel:
        """A link's end, at fault where this world has such faults."""
        if not self.wires_may_go_bad:
            return channel
        return FaultyChannel(channel, LinkFaults(self.faults, side))

    def lease_for(self, worker: Worker, lease: int) -> int:
        """The lease that a router names, which is mostly the one it was granted."""
        if self.agenda.now >= self.mixed_up_until_s:
            return lease
        others = [seq.lease for seq in worker.sequences if seq.lease]
        return self.random.choice([lease, lease + 1, *others])

    def _bad_wire(self, point: Point, random: Random) -> Fault | None:
        return self.chances(point, random) if self.agenda.now < self.bad_until_s else None

    def listening_at(self, endpoint: str) -> Worker | None:
        return next((w for w in self.live_workers(prefill=False) if w.endpoint == endpoint), None)

    def requests(self) -> list[Request]:
        return [request for router in self.routers for request in router.requests]

    def request(self, key: AttemptKey) -> Request | None:
        return next((r for r in self.requests() if r.number == key.request), None)

    def heard(self, worker: Worker, message: pb.WorkerMessage) -> None:
        """A worker said something to a router."""
        kind = message.WhichOneof("kind")
        if self.trace is not None and kind not in ("cache_delta", "load"):
            self.note("%s says %s", worker.name, " ".join(str(message).split()))
        self.invariants.heard(worker, kind or "")

    def note(self, text: str, *values: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.agenda.now:9.4f}  {text % values}")

    def _defect(self, text: str, error: Exception) -> None:
        self.violation(text)
        if self.trace is not None:
            self.trace += traceback.format_exception(error)

    def wrong(self, text: str) -> None:
        """A wrong token, or KV that would have led to one."""
        self.wrong_tokens += 1
        self.violation(text)

    def violation(self, text: str) -> None:
        self.note("VIOLATION: %s", text)
        self.violations.append(f"{self.agenda.now:.4f}: {text}")
