"""The receiving half of a simulated worker: the real lease table and links, on actors for
threads.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_sim.clock import NEVER
from kv_sim.memory import SlowMemory
from kv_sim.sending import LEAST_WAIT_S
from kv_sim.wire import SimChannel
from kv_sim.workers import DecodeSide, Worker
from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.handshake import Admitted
from kvferry.kv_transfer.jobs import ReceiveEvent, ReceiveJob
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.receiver import TICK_S
from kvferry.kv_transfer.receiver_link import ReceiverLink
from kvferry.kv_transfer.receiver_probes import ProbeTurn
from kvferry.kv_transfer.transports.faults import Side
from kvferry.kv_transfer.transports.faulty import FaultyChannel


class Receiving:
    """What ``kv_transfer.receiver.KvReceiver`` is, without its threads."""

    def __init__(self, worker: DecodeSide) -> None:
        self.worker, self.world = worker, worker.world
        self.table = LeaseTable(worker.layout, 0, self._ended, self.world.agenda.clock)
        self.probes = ProbeTurn(self.world.agenda.clock)
        self.links: list[Link] = []
        worker.actor("receiver", self._tick).wake()

    @property
    def counters(self):
        return self.table.counters.dropped

    def expect(self, job: ReceiveJob, ready: Callable[[], None]) -> None:
        self.world.invariants.job(self.worker, job.key)
        self.table.expect(job)
        ready()

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        self.table.renew(lease, deadline_s)

    def release(self, lease: LeaseId) -> None:
        self.table.release(lease)

    def accept(self, peer: Worker, channel: SimChannel) -> Admitted:
        """The handshake, without its messages."""
        setup = self.world.setup
        for link in self.links:
            if link.peer == peer.incarnation:
                link.retire()
        end = self.world.wrap(channel, Side.RECEIVER)
        admitted = Admitted(
            inlet=end.open_inlet(setup.num_slabs, setup.slab_bytes, 0.0),
            num_slabs=setup.num_slabs,
            slab_bytes=setup.slab_bytes,
            digest=self.worker.memory.digests[0],
            peer=peer.incarnation,
            rank=0,
        )
        self.links.append(Link(self, end, channel, admitted))
        return admitted

    def is_copying(self) -> bool:
        return self.worker.copying > 0

    def at_rest(self) -> str:
        for link in self.links:
            if not link.is_idle:
                return f"{link.name}: slabs are granted or wanted"
        return ""

    def _tick(self) -> float:
        """What the accepting thread does beside: deadlines, whatever the traffic."""
        self.table.expire()
        return TICK_S if not self.world.closing else NEVER

    def _ended(self, event: ReceiveEvent) -> None:
        self.world.invariants.ending(self.worker, event.key, event)
        self.worker.post(event)


class Link:
    """One link of a receiver, and the actor that stands for its thread."""

    def __init__(
        self,
        receiving: Receiving,
        end: SimChannel | FaultyChannel,
        wire_end: SimChannel,
        admitted: Admitted,
    ) -> None:
        worker = receiving.worker
        self.name = f"{worker.name} link of {admitted.peer}"
        self._receiving, self._end, self._wire_end = receiving, end, wire_end
        self.peer = admitted.peer
        memory = SlowMemory(worker)
        world = worker.world
        self._world = world
        self._actor = memory.actor = wire_end.actor = worker.actor(self.name, self._turn)
        self._link = ReceiverLink(
            end,
            admitted,
            memory,
            receiving.table,
            world.options(worker),
            receiving.probes,
            world.agenda.clock,
        )
        self._actor.wake()

    @property
    def is_idle(self) -> bool:
        """No slab is granted, none is wanted."""
        return self._link.idle_since_s is not None

    def retire(self) -> None:
        self._link.retire()

    def cut(self) -> None:
        self._wire_end.close()

    def _turn(self) -> float:
        try:
            frame = self._end.receive(0.0)
            if frame is not None:
                self._link.handle(frame)
            wait_s = min(max(self._link.turn(), LEAST_WAIT_S), self._end.pump())
        except (LinkLost, ProtocolError) as error:
            self._world.invariants.link_lost(self.name, error)
            self._link.close()
            self._end.close()
            self._receiving.links.remove(self)
            self._receiving.worker.retire(self._actor)
            return NEVER
        return 0.0 if self._wire_end.inbox else wait_s
