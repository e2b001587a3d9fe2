"""The link to one endpoint over its whole life: opened, lost, opened again while there is something
to send.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvferry.core.errors import LinkLost, LinkRefused, ProtocolError
from kvferry.kv_transfer.handshake import LinkOptions, introduce
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.outgoing import Transfer, TransferState, TransferTable
from kvferry.kv_transfer.sender_session import SenderSession
from kvferry.kv_transfer.transport import Channel

RETRY_S = 0.1
"""Between two tries to open a link."""


class SenderLink:
    """All but ``wake`` and ``stop`` belongs to the thread that calls ``run``."""

    def __init__(
        self,
        connect: Callable[[float], Channel],
        inbox: deque[Transfer],
        memory: KvMemory,
        table: TransferTable,
        options: LinkOptions,
    ) -> None:
        self._connect = connect
        self._inbox = inbox
        self._memory = memory
        self._table = table
        self._options = options
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._transfers: dict[int, Transfer] = {}
        """By lease; a receiver's lease ids are unique."""

    def wake(self) -> None:
        """Look at the inbox and at aborted transfers soon."""
        channel = self._channel
        if channel is not None:
            channel.wake()

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
                self._admit()
                self._fail_live(Reason.REFUSED, str(error))
            except (LinkLost, ProtocolError) as error:
                self._lost(str(error))
            if not self._transfers and not self._stopping.is_set():
                return
            self._stopping.wait(RETRY_S)
        self.fail_all(Reason.CLOSED)

    def _open_and_serve(self) -> None:
        """One connection, until it is lost or the link stopped.

        Raises LinkLost, LinkRefused, ProtocolError.
        """
        channel = self._channel = self._connect(self._options.silence_s)
        try:
            greeted = introduce(channel, self._options)
            session = SenderSession(
                channel, greeted, self._transfers, self._memory, self._table, self._options
            )
            session.serve(self._admit, self._stopping)
        finally:
            self._channel = None
            channel.close()

    def fail_all(self, reason: Reason = Reason.INTERNAL) -> None:
        """Fail every transfer that came this far."""
        self._admit()
        self._fail_live(reason)

    def _fail_live(self, reason: Reason, detail: str = "") -> None:
        for transfer in self._transfers.values():
            self._table.fail(transfer, reason, detail)
        self._transfers.clear()

    def _admit(self) -> list[Transfer]:
        """Take the new transfers out of the inbox."""
        admitted = []
        while self._inbox:
            transfer = self._inbox.popleft()
            if transfer.job.lease in self._transfers:
                self._table.fail(transfer, Reason.STALE, "another attempt uses this lease")
            else:
                self._transfers[transfer.job.lease] = transfer
                admitted.append(transfer)
        return admitted

    def _lost(self, detail: str) -> None:
        """Prepare the live transfers for the next link; one that is overdue twice fails."""
        self._admit()
        for lease, transfer in list(self._transfers.items()):
            transfer.rewind()
            if self._table.is_overdue(transfer):
                if transfer.retried:
                    self._table.fail(transfer, Reason.TIMEOUT, detail)
                self._table.moved(transfer, retried=True)
            if transfer.state is TransferState.ENDED:
                del self._transfers[lease]
