"""The sending half of a simulated worker: the real links and sessions, on actors for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kv_sim.clock import NEVER
from kv_sim.defects import Defect
from kv_sim.memory import SlowMemory
from kv_sim.wire import SimChannel, Wire, make_link
from kv_sim.workers import PrefillSide
from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError, TransferFailed
from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.group.orders import Chunk
from kvferry.kv_transfer.group.sender import LayerDone, layer_listener
from kvferry.kv_transfer.handshake import Greeted
from kvferry.kv_transfer.jobs import Reason, SendEvent, SendJob
from kvferry.kv_transfer.layout import head_nbytes
from kvferry.kv_transfer.outgoing import Owed, Progress, Transfer, TransferTable
from kvferry.kv_transfer.plan import parts, wire_dtype
from kvferry.kv_transfer.sender import Peer
from kvferry.kv_transfer.sender_link import RETRY_S, SenderLink, SenderParts
from kvferry.kv_transfer.sender_session import SenderSession
from kvferry.kv_transfer.transports.faults import Side
from kvferry.kv_transfer.transports.faulty import FaultyChannel

LEAST_WAIT_S = 0.1
"""What a session polls in between, the wire wakes it for."""


class Sending:
    """What ``kv_transfer.sender.KvSender`` is, without its threads."""

    def __init__(self, worker: PrefillSide) -> None:
        self.worker, self.world = worker, worker.world
        clock = self.world.agenda.clock
        options = self.world.options(worker)
        self.table = TransferTable(self._ended, clock, options.progress_timeout_s)
        self.links: dict[Peer, Link] = {}

    def begin(self, jobs: Sequence[SendJob]) -> None:
        (job,) = jobs
        self.world.invariants.job(self.worker, job.key)
        source = self.worker.memory.layout
        owed, fault = Owed((), 0, 0.0), ""
        try:
            wire = wire_dtype(source, job.target, job.wire)
            shards = parts(source, 0, job.target, 0)
            owed = Owed(shards, head_nbytes(source.head_dim, wire), self.worker.least_bytes)
        except TransferFailed as error:
            fault = str(error)
        transfer = self.table.add(job, owed)
        if fault:
            self.table.fail(transfer, Reason.MISMATCH, fault)
            return
        self._post(transfer)

    def follow(self, step: int, chunks: Sequence[Chunk]) -> LayerDone:
        return layer_listener(self, chunks, self.worker.memory.layout.num_layers)

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None:
        layers_end += self.world.defect is Defect.EARLY_LAYERS
        progress = Progress(layers_end, tokens_end, after)
        for transfer in self.table.of(key):
            if transfer.report(progress, self.world.agenda.now):
                transfer.wake()

    def abort(self, key: AttemptKey) -> None:
        for transfer in self.table.abort(key):
            transfer.wake()

    def open_links(self) -> list[Link]:
        return [link for link in self.links.values() if link.channel is not None]

    def at_rest(self) -> str:
        live = [link.name for link in self.links.values() if link.link.transfers]
        return f"transfers left in {live}" if live else ""

    def _post(self, transfer: Transfer) -> None:
        peer = Peer(transfer.job.peer, transfer.job.target_rank)
        link = self.links.get(peer)
        if link is None:
            link = self.links[peer] = Link(self, peer)
        link.post(transfer)

    def _ended(self, event: SendEvent) -> None:
        self.world.invariants.ending(self.worker, event.key, event)
        self.worker.post(event)


class Link:
    """One link of a sender, and the actor that stands for its thread."""

    def __init__(self, sending: Sending, peer: Peer) -> None:
        worker = sending.worker
        self.name = f"link {worker.name} - {peer.incarnation}"
        self.sending, self.worker, self.world = sending, worker, sending.world
        self.channel: SimChannel | FaultyChannel | None = None
        self.peer = peer
        self._session: SenderSession | None = None
        self._retry_at_s = 0.0
        memory = SlowMemory(worker)
        self._actor = memory.actor = worker.actor(self.name, self._turn)
        self.link = SenderLink(
            *peer,
            SenderParts(
                memory=memory,
                table=sending.table,
                options=self.world.options(worker),
                connect=_no_thread,
                choose=_no_thread,
                clock=self.world.agenda.clock,
                failed=_no_thread,
                works=_no_thread,
            ),
        )

    def post(self, transfer: Transfer) -> None:
        self.link.post(transfer)
        transfer.wake = self._actor.wake
        self._actor.wake()

    def cut(self) -> None:
        if self.channel is not None:
            self.channel.close()

    def _connect(self, endpoint: str, timeout_s: float) -> SimChannel | FaultyChannel:
        self.worker.busy(self._actor, self.world.pace.dial_s())
        worker = self.world.listening_at(endpoint)
        if worker is None:
            raise LinkRefused(f"nobody listens at {endpoint}")
        if worker.paused:
            self.worker.busy(self._actor, timeout_s)
            raise LinkLost("the peer does not answer")
        wire = Wire(self.world, self.world.random.choice(self.world.setup.paths))
        ours, theirs = make_link(wire)
        ours.actor = self._actor
        self._end = ours
        channel = self.world.wrap(ours, Side.SENDER)
        admitted = worker.receiving.accept(self.worker, theirs)
        self.greeted = Greeted(
            outlet=channel.open_outlet(admitted.num_slabs, admitted.slab_bytes, 0.0),
            num_slabs=admitted.num_slabs,
            slab_bytes=admitted.slab_bytes,
            digest=admitted.digest,
            peer=worker.incarnation,
        )
        return channel

    def _turn(self) -> float:
        if self._session is None and self.world.agenda.now < self._retry_at_s:
            return self._retry_at_s - self.world.agenda.now
        try:
            if self._session is None:
                self._open()
            return self._serve()
        except LinkRefused as error:
            self._close()
            self.link.refused(str(error))
        except (LinkLost, ProtocolError) as error:
            self.world.invariants.link_lost(self.name, error)
            self._close()
            self.link.lost(str(error))
        if self.link.transfers or self.link.inbox:
            self._retry_at_s = self.world.agenda.now + RETRY_S
            return RETRY_S
        self.sending.links.pop(self.peer, None)
        self.worker.retire(self._actor)
        return NEVER

    def _open(self) -> None:
        self.link.admit()
        endpoint = next((t.job.endpoints[0] for t in reversed(self.link.transfers.values())), None)
        if endpoint is None:
            raise LinkLost("nothing to send")
        self.channel = self._connect(endpoint, self.world.options(self.worker).silence_s)
        self._session = self.link.session(self.channel, self.greeted)

    def _serve(self) -> float:
        assert self.channel is not None
        assert self._session is not None
        frame = self.channel.receive(0.0)
        if frame is not None:
            self._session.handle(frame)
        wait_s = self._session.turn()
        if self._end.inbox:
            return 0.0
        return min(max(wait_s, LEAST_WAIT_S), self.channel.pump())

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def _no_thread(*arguments: object) -> NoReturn:
    """What only ``SenderLink.run`` asks for, whose place ``Link`` takes here."""
    raise AssertionError(f"a simulated link asked for {arguments}")
