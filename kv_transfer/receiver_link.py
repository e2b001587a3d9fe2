"""One link of a receiver: grants slabs to the leases that senders offer for, and scatters what
comes back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.kv_transfer.handshake import Greeted, LinkOptions
from kvferry.kv_transfer.jobs import Reason, ReceiveJob
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.messages import (
    Abort,
    Ack,
    Beat,
    Complete,
    Credit,
    Header,
    Message,
    Offer,
    Proof,
    Resend,
    Return,
    decode_to_receiver,
    encode,
)
from kvferry.kv_transfer.transport import Channel
from kvferry.kv_transfer.verdicts import Answer, Outcome, Verdict


@dataclass(slots=True)
class _Want:
    """Slabs that a sender has ready for a lease and that have no memory yet."""

    key: AttemptKey
    slabs: int


class ReceiverLink:
    """The state of one link; all of it belongs to the thread that calls ``serve``."""

    def __init__(
        self,
        channel: Channel,
        greeted: Greeted,
        memory: KvMemory,
        leases: LeaseTable,
        options: LinkOptions,
    ) -> None:
        self._channel = channel
        self._staging = greeted.staging
        self._slab_bytes = greeted.slab_bytes
        self._memory = memory
        self._leases = leases
        self._options = options
        self._free = list(range(greeted.num_slabs))
        self._granted: dict[int, tuple[int, LeaseId]] = {}
        """slab -> (grant, lease)"""
        self._last_grant = 0
        self._wants: OrderedDict[LeaseId, _Want] = OrderedDict()

    def serve(self, closing: threading.Event) -> None:
        """Serve until closing. Raises LinkLost, ProtocolError."""
        heard_at = sent_at = time.monotonic()
        try:
            while not closing.is_set():
                frame = self._channel.receive(sent_at + self._options.beat_s - time.monotonic())
                now = time.monotonic()
                if frame is not None:
                    heard_at = now
                    self._handle(frame)
                elif now - heard_at > self._options.silence_s:
                    raise LinkLost("the peer is silent")
                if now - sent_at >= self._options.beat_s:
                    self._send(Beat())
                    sent_at = now
        finally:
            self._staging.close()

    def _handle(self, frame: bytes) -> None:
        message = decode_to_receiver(frame)
        match message:
            case Offer():
                self._offer(message)
            case Header():
                self._header(message)
            case Return():
                self._take_back(message.slab, message.grant)
            case Abort():
                self._aborted(message)
            case Beat():
                pass
            case Proof():
                raise ProtocolError("a second proof")
        self._grant()

    def _offer(self, offer: Offer) -> None:
        lease = LeaseId(offer.lease)
        verdict = self._leases.offered(offer.key, lease, offer.nbytes)
        if verdict.answer is Answer.ACK:
            self._wants[lease] = _Want(offer.key, offer.slabs)
        else:
            self._answer_ended(offer.key, lease, verdict)

    def _grant(self) -> None:
        """Hand free slabs to the leases in turn."""
        while self._free and self._wants:
            lease, want = self._wants.popitem(last=False)
            if not self._leases.is_live(want.key, lease):
                self._answer_ended(want.key, lease, self._leases.offered(want.key, lease))
                continue
            slab = self._free.pop()
            self._last_grant += 1
            self._granted[slab] = (self._last_grant, lease)
            self._send(Credit(lease=lease, slab=slab, grant=self._last_grant))
            want.slabs -= 1
            if want.slabs:
                self._wants[lease] = want

    def _header(self, message: Header) -> None:
        header = message.header
        lease = LeaseId(header.lease)
        if self._granted.get(message.slab) != (message.grant, lease):
            # The memory has another use by now: do not look at it.
            recalled = self._leases.recall(header)
            if recalled is not None:
                self._reply(message, recalled)
            return
        if header.nbytes > self._slab_bytes:
            raise ProtocolError("a slab larger than its memory")
        verdict = self._leases.claim(header, self._options.silence_s)
        if verdict.answer is Answer.SCATTER and verdict.job is not None:
            verdict = self._scatter(message, verdict.job)
        if verdict.answer is not Answer.RESEND:
            self._take_back(message.slab, message.grant)
        self._reply(message, verdict)

    def _reply(self, message: Header, verdict: Verdict) -> None:
        header, lease = message.header, LeaseId(message.header.lease)
        match verdict.answer:
            case Answer.ACK:
                self._send(Ack(lease=lease, index=header.index, grant=message.grant))
            case Answer.RESEND:
                self._send(Resend(lease=lease, index=header.index, grant=message.grant))
            case _:
                self._answer_ended(header.key, lease, verdict)

    def _scatter(self, message: Header, job: ReceiveJob) -> Verdict:
        header, move = message.header, message.header.move
        outcome = Outcome.BROKEN
        started_at = time.perf_counter()
        try:
            if not self._memory.is_fresh(job.blocks, move):
                outcome = Outcome.STALE
            else:
                slab = self._staging.slab(message.slab)[: header.nbytes]
                digests = self._memory.scatter(job.blocks, move, slab)
                if not self._memory.is_fresh(job.blocks, move):
                    outcome = Outcome.STALE
                else:
                    outcome = Outcome.VERIFIED if digests == header.digests else Outcome.DAMAGED
        finally:
            verdict = self._leases.settle(header, outcome, time.perf_counter() - started_at)
        return verdict

    def _take_back(self, slab: int, grant: int) -> None:
        held = self._granted.get(slab)
        if held is not None and held[0] == grant:
            del self._granted[slab]
            self._free.append(slab)

    def _aborted(self, message: Abort) -> None:
        lease = LeaseId(message.lease)
        self._forget(message.key, lease)
        self._leases.fail(message.key, lease, Reason.ABORTED, message.detail or message.reason)

    def _forget(self, key: AttemptKey, lease: LeaseId) -> None:
        want = self._wants.get(lease)
        if want is not None and want.key == key:
            del self._wants[lease]

    def _answer_ended(self, key: AttemptKey, lease: LeaseId, verdict: Verdict) -> None:
        self._forget(key, lease)
        if verdict.answer is Answer.COMPLETE:
            self._send(Complete(key=key, lease=lease))
        else:
            reason = verdict.reason or Reason.ENDED
            self._send(Abort(key=key, lease=lease, reason=reason, detail=verdict.detail))

    def _send(self, message: Message) -> None:
        self._channel.send(encode(message), self._options.silence_s)
