"""One connection of a sender: offers what is computed, fills what is granted, sees each slab
acknowledged.

No thread, no clock of its own, and no I/O but sending: ``handle`` takes a frame, ``turn`` does
whatever is due.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kvferry.core.errors import ProtocolError, TransferFailed
from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.frames import all_to_sender
from kvferry.kv_transfer.handshake import Greeted, LinkOptions
from kvferry.kv_transfer.jobs import Reason, SendAborted, SendFailed
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.messages import (
    MAX_TEXT,
    Abort,
    Ack,
    Beat,
    Complete,
    Credit,
    Missing,
    Offer,
    Pull,
    Resend,
    Spare,
    ToSender,
)
from kvferry.kv_transfer.outbox import Outbox
from kvferry.kv_transfer.outgoing import Transfer, TransferTable
from kvferry.kv_transfer.pulse import Pulse
from kvferry.kv_transfer.sender_slabs import GrantedSlabs
from kvferry.kv_transfer.states import State
from kvferry.kv_transfer.transport import Channel

POLL_S = 0.002
"""Between two looks at slabs in flight, should their data path not wake us."""


class TransferSource(Protocol):
    """Where transfers come from, and where they live while links come and go."""

    @property
    def transfers(self) -> dict[int, Transfer]:
        """By lease."""
        ...

    def admit(self) -> list[Transfer]:
        """Add the new ones, which are returned, to ``transfers``."""
        ...


class SenderSession:
    """A connection that has been greeted; all of it belongs to the link's thread."""

    def __init__(
        self,
        channel: Channel,
        greeted: Greeted,
        source: TransferSource,
        memory: KvMemory,
        table: TransferTable,
        options: LinkOptions,
        clock: Callable[[], float],
    ) -> None:
        self._channel = channel
        self._slab_bytes = greeted.slab_bytes
        self._source = source
        self._transfers = source.transfers
        self._table = table
        self._options = options
        self._clock = clock
        self._pulse = Pulse(options, clock)
        self._outbox = Outbox(channel, self._pulse, options.silence_s)
        self._slabs = GrantedSlabs(
            greeted, memory, table, self._outbox, clock, options.progress_timeout_s
        )
        self._sweep_s = -math.inf
        self.has_moved = False
        """Whether the receiver has verified anything that came this way."""
        for transfer in self._transfers.values():
            self._offer(transfer)
        self._outbox.flush()

    def turn(self) -> float:
        """Do all that is due. Seconds until it wants to be called again.

        Raises LinkLost when the peer is silent or the data path broke.
        """
        if self._pulse.is_doubtful():
            return 0.0
        if self._sweep_s == -math.inf:
            # What has just ended makes room for another attempt on its lease.
            self._sweep_s = self._clock() + self._sweep()
        self._offer_more()
        if not self._slabs.pack():
            self._look_soon()
        self._slabs.land()
        self._outbox.flush()
        now = self._clock()
        if now >= self._sweep_s:
            self._sweep_s = now + self._sweep()
        if self._pulse.needs_beat():
            self._outbox.put(Beat())
        self._outbox.flush()
        if self._slabs.in_flight:
            return POLL_S
        return max(0.0, min(self._sweep_s - now, self._pulse.wait_s()))

    def handle(self, frame: bytes) -> None:
        """Act on messages; ``turn`` must follow. Raises ProtocolError for one out of place."""
        self._pulse.heard()
        for message in all_to_sender(frame):
            self._handle(message)

    def _handle(self, message: ToSender) -> None:
        match message:
            case Credit():
                self._credit(message)
            case Spare():
                self._spare(message)
            case Pull():
                self._slabs.pull(message)
            case Ack():
                self._ack(message)
            case Resend():
                self._resend(message)
            case Missing():
                self._missing(message)
            case Complete():
                self._complete(message)
            case Abort():
                transfer = self._live(message.lease, message.key)
                if transfer is not None:
                    self._table.fail(transfer, message.reason, message.detail)
                    self._look_soon()
            case Beat():
                pass
            case _:
                raise ProtocolError("a message of the handshake after it")

    def close(self) -> None:
        """The link is gone."""
        self._slabs.close()

    def _offer_more(self) -> None:
        """Offer what became ready."""
        self._source.admit()
        for transfer in self._transfers.values():
            if not transfer.is_live:
                self._look_soon()
                continue
            if not transfer.has_progressed:
                continue
            idle = not transfer.is_waiting
            try:
                more = transfer.cut(
                    self._slab_bytes, self._clock(), partial(self._slabs.followed_from, transfer)
                )
            except TransferFailed as error:
                self._table.fail(transfer, Reason.MISMATCH, str(error))
                self._look_soon()
                continue
            if more:
                if idle:
                    self._table.moved(transfer)
                self._offer(transfer)
                self._look_soon()

    def _offer(self, transfer: Transfer) -> None:
        """Give the slabs that stand ready what is spare, and say how many are left without."""
        if not transfer.unsent or not self._table.offer(transfer):
            return
        self._slabs.use_spares(transfer)
        transfer.account.transport = self._channel.transport
        transfer.count_starving(self._clock())
        job = transfer.job
        self._outbox.put(
            Offer(
                key=job.key,
                lease=job.lease,
                slabs=len(transfer.unsent),
                nbytes=transfer.nbytes,
                ranks=transfer.owed.num_ranks,
            )
        )

    def _credit(self, credit: Credit) -> None:
        if not self._slabs.credits.is_new(credit):
            return
        transfer = self._live(credit.lease)
        if transfer is None or not transfer.unsent:
            self._slabs.give_back(credit)
            return
        self._table.moved(transfer)
        self._slabs.grant(credit, transfer)
        transfer.count_starving(self._clock())

    def _spare(self, spare: Spare) -> None:
        """For a slab that waits, be it of a transfer that has asked for a credit too."""
        if not self._slabs.credits.is_new(spare):
            return
        self._slabs.credits.keep(spare)
        for transfer in self._transfers.values():
            if transfer.unsent and transfer.state is State.OFFERED:
                self._table.moved(transfer)
                self._slabs.use_spares(transfer)
                transfer.count_starving(self._clock())
                return

    def _ack(self, ack: Ack) -> None:
        transfer = self._slabs.settle(ack)
        if transfer is None:
            return
        self.has_moved = True
        self._table.moved(transfer)
        transfer.ack(ack.index)
        if transfer.is_acked:
            self._table.succeed(transfer)
            self._look_soon()

    def _resend(self, resend: Resend) -> None:
        """The slab was damaged: it is the next to be granted."""
        transfer = self._slabs.settle(resend)
        if transfer is None:
            return
        self._table.moved(transfer)
        transfer.account.resends += 1
        transfer.unsent.appendleft(resend.index)
        transfer.count_starving(self._clock())

    def _missing(self, missing: Missing) -> None:
        transfer = self._live(missing.lease)
        if transfer is None:
            return
        for held in self._slabs.of(transfer):
            if missing.begin <= held.index < missing.end:
                self._slabs.announce(held)

    def _complete(self, complete: Complete) -> None:
        transfer = self._live(complete.lease, complete.key)
        if transfer is None:
            return
        if transfer.is_whole:
            for index in range(len(transfer.slabs)):
                transfer.ack(index)
            self._table.succeed(transfer)
        else:
            self._table.fail(transfer, Reason.MISMATCH, "complete before all was sent")
        self._look_soon()

    def _live(self, lease: int, key: AttemptKey | None = None) -> Transfer | None:
        transfer = self._transfers.get(lease)
        if transfer is None or not transfer.is_live:
            return None
        return transfer if key is None or key == transfer.job.key else None

    def _look_soon(self) -> None:
        self._sweep_s = -math.inf

    def _sweep(self) -> float:
        """Look after every transfer; seconds until the next one is overdue.

        Those that have ended are dropped and give back what they hold; those that do not move are
        sent once more, then fail.
        """
        wait_s = math.inf
        for lease, transfer in list(self._transfers.items()):
            is_waiting = transfer.is_waiting
            if is_waiting and self._table.is_overdue(transfer):
                self._retry(transfer)
            if transfer.state.is_ended:
                del self._transfers[lease]
                self._drop(transfer)
            elif is_waiting:
                wait_s = min(wait_s, self._table.overdue_in_s(transfer))
        return wait_s

    def _retry(self, transfer: Transfer) -> None:
        """A transfer does not move."""
        if transfer.retried:
            self._table.fail(transfer, Reason.TIMEOUT, "no progress")
            return
        self._table.moved(transfer, retried=True)
        self._offer(transfer)
        for held in self._slabs.of(transfer):
            self._slabs.announce(held)

    def _drop(self, transfer: Transfer) -> None:
        """Tell the receiver of an end that it has not decided, and give back what is held."""
        job, ending = transfer.job, transfer.ending
        if isinstance(ending, SendFailed | SendAborted):
            reason, detail = Reason.ABORTED, ""
            if isinstance(ending, SendFailed):
                reason, detail = ending.reason, ending.detail[:MAX_TEXT]
            self._outbox.put(Abort(key=job.key, lease=job.lease, reason=reason, detail=detail))
        self._slabs.drop(transfer)
        self._slabs.land()
