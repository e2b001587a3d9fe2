"""One connection of a sender: offers transfers, packs into granted slabs, sees each slab
acknowledged.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from kvferry.core.errors import LinkLost, ProtocolError, TransferFailed
from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.handshake import Greeted, LinkOptions
from kvferry.kv_transfer.jobs import Reason, SendFailed
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.messages import (
    MAX_TEXT,
    Abort,
    Ack,
    Beat,
    Complete,
    Credit,
    Header,
    Message,
    Offer,
    Resend,
    Return,
    SlabHeader,
    decode_to_sender,
    encode,
)
from kvferry.kv_transfer.outgoing import Transfer, TransferState, TransferTable
from kvferry.kv_transfer.plan import SlabMove, plan_slabs
from kvferry.kv_transfer.transport import Channel


class SenderSession:
    """A connection that has been greeted; all of it belongs to the link's thread."""

    def __init__(
        self,
        channel: Channel,
        greeted: Greeted,
        transfers: dict[int, Transfer],
        memory: KvMemory,
        table: TransferTable,
        options: LinkOptions,
    ) -> None:
        """``transfers``: by lease; the link carries them over to the next session."""
        self._channel = channel
        self._staging = greeted.staging
        self._slab_bytes = greeted.slab_bytes
        self._transfers = transfers
        self._memory = memory
        self._table = table
        self._options = options
        self._headers: dict[int, Header] = {}
        """grant -> the message that is not yet acknowledged."""

    def serve(self, admit: Callable[[], list[Transfer]], stopping: threading.Event) -> None:
        """Move slabs until stopped; ``admit`` has new transfers. Raises LinkLost, ProtocolError."""
        for transfer in self._transfers.values():
            self._offer(transfer)
        heard_at = sent_at = time.monotonic()
        sweep_at = heard_at
        try:
            while not stopping.is_set():
                for transfer in admit():
                    self._offer(transfer)
                    sweep_at = heard_at
                if time.monotonic() >= sweep_at:
                    sweep_at = time.monotonic() + self._sweep()
                wait_until = min(sweep_at, sent_at + self._options.beat_s)
                frame = self._channel.receive(wait_until - time.monotonic())
                now = time.monotonic()
                if frame is not None:
                    heard_at = now
                    if self._handle(frame):
                        sweep_at = now
                else:
                    # A wait that was cut short may mean an abort.
                    sweep_at = now
                    if now - heard_at > self._options.silence_s:
                        raise LinkLost("the peer is silent")
                if now - sent_at >= self._options.beat_s:
                    self._send(Beat())
                    sent_at = now
        finally:
            self._staging.close()

    def _offer(self, transfer: Transfer) -> None:
        """Offer what is not acknowledged yet; layouts that cannot be bridged end it here."""
        if transfer.state is TransferState.ENDED:
            return
        job = transfer.job
        if not transfer.moves:
            try:
                transfer.moves = plan_slabs(
                    self._memory.layout, job.target, job.tokens, self._slab_bytes
                )
            except TransferFailed as error:
                self._table.fail(transfer, Reason.MISMATCH, str(error))
                return
            transfer.rewind()
        if transfer.unsent:
            nbytes = sum(move.nbytes for move in transfer.moves)
            slabs = len(transfer.unsent)
            self._send(Offer(key=job.key, lease=job.lease, slabs=slabs, nbytes=nbytes))
        elif not transfer.held:
            self._table.succeed(transfer)

    def _sweep(self) -> float:
        """Look after every transfer; seconds until the next one is overdue.

        Those that have ended are dropped and give back what they hold; those that do not move are
        sent once more, then fail.
        """
        for lease, transfer in list(self._transfers.items()):
            if self._table.is_overdue(transfer):
                if transfer.retried:
                    self._table.fail(transfer, Reason.TIMEOUT, "no progress")
                else:
                    self._table.moved(transfer, retried=True)
                    self._offer(transfer)
                    for grant in transfer.held:
                        self._send(self._headers[grant])
            if transfer.state is TransferState.ENDED:
                del self._transfers[lease]
                if not transfer.is_delivered:
                    self._send_abort(transfer)
                for grant, (slab, _) in transfer.held.items():
                    self._headers.pop(grant, None)
                    self._send(Return(slab=slab, grant=grant))
        timers = [self._table.overdue_in_s(transfer) for transfer in self._transfers.values()]
        return min(timers, default=math.inf)

    def _handle(self, frame: bytes) -> bool:
        """Act on a message. Whether it ended a transfer."""
        message = decode_to_sender(frame)
        match message:
            case Credit() | Ack() | Resend():
                transfer = self._live(message.lease)
            case Complete() | Abort():
                transfer = self._live(message.lease, message.key)
            case Beat():
                return False
            case _:
                raise ProtocolError("a message of the handshake after it")
        if transfer is None:
            if isinstance(message, Credit):
                self._send(Return(slab=message.slab, grant=message.grant))
            return False
        match message:
            case Credit():
                self._credit(transfer, message)
            case Ack():
                self._ack(transfer, message)
            case Resend():
                self._resend(transfer, message)
            case Complete():
                transfer.acked.update(move.index for move in transfer.moves)
                self._table.succeed(transfer)
            case Abort():
                self._table.fail(transfer, message.reason, message.detail)
        return transfer.state is TransferState.ENDED

    def _live(self, lease: int, key: AttemptKey | None = None) -> Transfer | None:
        transfer = self._transfers.get(lease)
        if transfer is None or transfer.state is TransferState.ENDED:
            return None
        return transfer if key is None or key == transfer.job.key else None

    def _credit(self, transfer: Transfer, credit: Credit) -> None:
        if not transfer.unsent:
            self._send(Return(slab=credit.slab, grant=credit.grant))
            return
        self._table.moved(transfer)
        index = transfer.unsent.pop()
        transfer.held[credit.grant] = (credit.slab, index)
        self._pack(transfer, credit.grant)

    def _ack(self, transfer: Transfer, ack: Ack) -> None:
        if transfer.held.get(ack.grant, (0, None))[1] != ack.index:
            return
        del transfer.held[ack.grant]
        del self._headers[ack.grant]
        self._table.moved(transfer)
        transfer.acked.add(ack.index)
        if len(transfer.acked) == len(transfer.moves):
            self._table.succeed(transfer)

    def _resend(self, transfer: Transfer, resend: Resend) -> None:
        if resend.grant in transfer.held:
            self._table.moved(transfer)
            self._pack(transfer, resend.grant)

    def _pack(self, transfer: Transfer, grant: int) -> None:
        """Fill the granted slab and say so.

        A block given away meanwhile ends the transfer, and nothing is sent.
        """
        if not self._table.begin_pack(transfer):
            return
        job, (slab, index) = transfer.job, transfer.held[grant]
        move = transfer.moves[index]
        digests = None
        try:
            if self._memory.is_fresh(job.blocks, move):
                view = self._staging.slab(slab)[: move.nbytes]
                started_at = time.perf_counter()
                digests = self._memory.pack(job.blocks, move, view)
                transfer.busy_s += time.perf_counter() - started_at
                transfer.nbytes += move.nbytes
                if not self._memory.is_fresh(job.blocks, move):
                    digests = None
        finally:
            goes_on = self._table.finish_pack(transfer)
        if not goes_on:
            return
        if digests is None:
            self._table.fail(transfer, Reason.STALE, "a block was given away")
            return
        header = self._header(transfer, move, digests)
        message = self._headers[grant] = Header(slab=slab, grant=grant, header=header)
        self._send(message)

    def _header(self, transfer: Transfer, move: SlabMove, digests: list[int]) -> SlabHeader:
        return SlabHeader(
            key=transfer.job.key,
            lease=transfer.job.lease,
            index=move.index,
            count=len(transfer.moves),
            layers=move.layers,
            heads=move.heads,
            tokens=move.tokens,
            flavour=self._memory.layout.flavour,
            chain_hash=transfer.job.chain_hash,
            nbytes=move.nbytes,
            digests=digests,
        )

    def _send_abort(self, transfer: Transfer) -> None:
        job, ending = transfer.job, transfer.ending
        reason, detail = Reason.ABORTED, ""
        if isinstance(ending, SendFailed):
            reason, detail = ending.reason, ending.detail
        self._send(Abort(key=job.key, lease=job.lease, reason=reason, detail=detail[:MAX_TEXT]))

    def _send(self, message: Message) -> None:
        self._channel.send(encode(message), self._options.silence_s)
