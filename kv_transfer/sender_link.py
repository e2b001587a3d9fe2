"""The link to one rank of one receiver over its whole life: opened, lost, opened again while there
is something to send.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.handshake import Greeted, LinkOptions, introduce
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.outgoing import Transfer, TransferTable
from kvferry.kv_transfer.sender_session import SenderSession
from kvferry.kv_transfer.transport import Channel, Connect

RETRY_S = 0.1
"""Between two tries to open a link."""
AT_ONCE = 64
"""Messages that are taken in before what they ask for is done."""


class Choose(Protocol):
    """Picks the endpoint of a receiver's rank that a link is opened over."""

    def __call__(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> str:
        """Raises LinkRefused when none of them can be used."""
        ...


class Failed(Protocol):
    """Hears of a link that broke before it moved anything, or could not be opened."""

    def __call__(
        self, peer: Incarnation, rank: int, endpoints: tuple[str, ...], endpoint: str, why: str
    ) -> bool:
        """Whether ``Choose`` has another endpoint now."""
        ...


class Works(Protocol):
    """Hears of a link that moved something."""

    def __call__(self, peer: Incarnation, rank: int, endpoint: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SenderParts:
    """What all links of a sender share."""

    memory: KvMemory
    table: TransferTable
    options: LinkOptions
    connect: Connect
    choose: Choose
    clock: Callable[[], float]
    failed: Failed
    works: Works


class SenderLink:
    """All of it but ``post``, ``wake``, ``prefer`` and ``stop`` belongs to ``run``'s thread."""

    def __init__(self, peer: Incarnation, rank: int, parts: SenderParts) -> None:
        """``rank``: the receiver's."""
        self.peer, self.rank = peer, rank
        self.inbox: deque[Transfer] = deque()
        self.transfers: dict[int, Transfer] = {}
        """By lease; a receiver's lease ids are unique."""
        self._parts = parts
        self._endpoints: tuple[str, ...] = ()
        """Of the newest job."""
        self._endpoint = ""
        """Of the link that is open, or was last."""
        self._preferred = ""
        self._stopping = threading.Event()
        self._channel: Channel | None = None

    def post(self, transfer: Transfer) -> None:
        """Take a transfer in charge; ``wake`` makes the link look at it."""
        transfer.wake = self.wake
        self.inbox.append(transfer)

    def wake(self) -> None:
        """Look at the inbox, at what is computed and at aborted transfers soon."""
        channel = self._channel
        if channel is not None:
            channel.wake()

    def prefer(self, endpoint: str) -> None:
        """Leave for this endpoint once all that is under way has ended. Any thread may call it."""
        self._preferred = endpoint
        self.wake()

    def stop(self) -> None:
        """End soon; live transfers fail."""
        self._stopping.set()
        self.wake()

    def run(self) -> None:
        """Serve until the link is lost and nothing is left to send, or until stopped."""
        while not self._stopping.is_set():
            try:
                self._open_and_serve()
            except LinkRefused as error:
                self.refused(str(error))
            except (LinkLost, ProtocolError) as error:
                self.lost(str(error))
            if not self.transfers and not self._stopping.is_set():
                return
            self._stopping.wait(RETRY_S)
        self.fail_all(Reason.CLOSED)

    def session(self, channel: Channel, greeted: Greeted) -> SenderSession:
        """Carry on over a link that has been opened.

        Raises LinkRefused when another incarnation answers than the one that granted the leases.
        """
        if greeted.peer != self.peer:
            greeted.outlet.close()
            raise LinkRefused("the peer has restarted")
        parts = self._parts
        return SenderSession(
            channel, greeted, self, parts.memory, parts.table, parts.options, parts.clock
        )

    def admit(self) -> list[Transfer]:
        """Take the new transfers out of the inbox; before a move to another endpoint they wait."""
        admitted: list[Transfer] = []
        if self._channel is not None and self._wants_other:
            return admitted
        while self.inbox:
            transfer = self.inbox.popleft()
            self._endpoints = transfer.job.endpoints
            if transfer.job.lease in self.transfers:
                self._parts.table.fail(transfer, Reason.STALE, "another attempt uses this lease")
            else:
                self.transfers[transfer.job.lease] = transfer
                admitted.append(transfer)
        return admitted

    def lost(self, detail: str) -> None:
        """Prepare the live transfers for the next link; one that is overdue twice fails."""
        self.admit()
        table = self._parts.table
        for lease, transfer in list(self.transfers.items()):
            table.lost(transfer)
            if table.is_overdue(transfer):
                if transfer.retried:
                    table.fail(transfer, Reason.TIMEOUT, detail)
                table.moved(transfer, retried=True)
            if not transfer.is_live:
                del self.transfers[lease]

    def refused(self, detail: str) -> None:
        """Trying again is useless: fail all that came this far."""
        self.fail_all(Reason.REFUSED, detail)

    def fail_all(self, reason: Reason = Reason.INTERNAL, detail: str = "") -> None:
        """Fail every transfer that came this far."""
        self.admit()
        for transfer in self.transfers.values():
            self._parts.table.fail(transfer, reason, detail)
        self.transfers.clear()

    def _open_and_serve(self) -> None:
        """One connection, until it is lost, another is preferred or the link stopped.

        Raises LinkLost, LinkRefused, ProtocolError.
        """
        self.admit()
        parts, whom = self._parts, (self.peer, self.rank)
        endpoint = self._endpoint = parts.choose(*whom, self._endpoints)
        self._preferred = ""
        session: SenderSession | None = None
        try:
            with closing(parts.connect(endpoint, parts.options.silence_s)) as channel:
                session = self._open(channel)
                self._serve(channel, session)
        except (LinkLost, ProtocolError) as error:
            if session is not None and (session.has_moved or not self.transfers):
                raise
            others = parts.failed(*whom, self._endpoints, endpoint, str(error))
            if others and isinstance(error, LinkRefused):
                # Not the peer refuses, but this way to it.
                raise LinkLost(str(error)) from error
            raise
        finally:
            self._channel = None

    def _open(self, channel: Channel) -> SenderSession:
        self._channel = channel
        memory, options = self._parts.memory, self._parts.options
        greeted = introduce(
            channel, options, memory.rank, memory.digests, is_closing=self._stopping.is_set
        )
        return self.session(channel, greeted)

    def _serve(self, channel: Channel, session: SenderSession) -> None:
        is_proven = False
        try:
            while not self._stopping.is_set() and (self.transfers or not self._wants_other):
                frame, count = channel.receive(session.turn()), 0
                while frame is not None:
                    session.handle(frame)
                    count += 1
                    frame = channel.receive(0.0) if count < AT_ONCE else None
                if session.has_moved and not is_proven:
                    is_proven = True
                    self._parts.works(self.peer, self.rank, self._endpoint)
        finally:
            session.close()

    @property
    def _wants_other(self) -> bool:
        return self._preferred not in ("", self._endpoint)
