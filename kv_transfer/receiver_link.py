"""One link of a receiver: grants slabs to the leases that senders offer for, and scatters what
comes back.

``handle`` takes a message, ``turn`` does all that is due; neither waits for anything but a peer
that reads too slowly, and both go by an injected clock. A filled slab stays with its grant until
its bytes are here and no other slab of its lease is being scattered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.frames import all_to_receiver
from kvferry.kv_transfer.grants import Grants
from kvferry.kv_transfer.handshake import Admitted, LinkOptions
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.messages import (
    PROBE_LEASE,
    Abort,
    Ack,
    Beat,
    Complete,
    Filling,
    Header,
    Measure,
    Missing,
    Offer,
    Proof,
    Pull,
    Resend,
    Return,
    Sample,
    SlabHeader,
    ToReceiver,
)
from kvferry.kv_transfer.outbox import Outbox
from kvferry.kv_transfer.pulse import Pulse
from kvferry.kv_transfer.receiver_probes import LinkProbe, ProbeTurn
from kvferry.kv_transfer.scatter import Scatter
from kvferry.kv_transfer.transport import Channel
from kvferry.kv_transfer.verdicts import Answer, Source, Verdict
from kvferry.kv_transfer.wants import Wants

UNUSED_TIMEOUTS = 3.0
"""Progress timeouts after which a grant that nobody uses must have been lost: after one its sender
asks again, after two it gives up.
"""


class ReceiverLink:
    """The state of one link; all but ``retire`` belongs to one thread."""

    def __init__(
        self,
        channel: Channel,
        admitted: Admitted,
        memory: KvMemory,
        leases: LeaseTable,
        options: LinkOptions,
        probes: ProbeTurn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._leases = leases
        self._counters = leases.counters
        self._options = options
        self._clock = clock
        self._grants = Grants(admitted.inlet, admitted.num_slabs, admitted.slab_bytes, clock)
        self._source = Source(admitted.peer, admitted.rank, channel.transport, self._leases_moved)
        self._scatter = Scatter(memory, leases, self._source, admitted.digest, clock)
        self._wants = Wants()
        self._offered: dict[LeaseId, AttemptKey] = {}
        """Leases whose sender has not been told of their end."""
        self._probe = LinkProbe(probes, self._grants, channel.wake, admitted.inlet.is_device)
        self._num_spare = 0
        """Slabs that the sender is to hold ahead of its offers, once it has made one."""
        self._most_spare = min(options.spare_slabs, admitted.num_slabs // 2)
        self._has_news = False
        self._retired = False
        self.idle_since_s: float | None = clock()
        """Since when nothing has been granted and nothing wanted. Any thread may read it."""
        self._pulse = Pulse(options, clock)
        self._outbox = Outbox(channel, self._pulse, options.silence_s)

    def retire(self) -> None:
        """End soon, as if the peer were lost. Any thread may call it."""
        self._retired = True
        self._channel.wake()

    @property
    def is_retiring(self) -> bool:
        return self._retired

    def serve(self, closing: threading.Event) -> None:
        """Serve until closing. Raises LinkLost, ProtocolError."""
        try:
            while not closing.is_set():
                frame = self._channel.receive(self.turn())
                if frame is not None:
                    self.handle(frame)
        finally:
            self.close()

    def close(self) -> None:
        self._leases.unwatch(self._source)
        self._probe.close()
        self._grants.close()

    def handle(self, frame: bytes) -> None:
        """Take in messages; ``turn`` must follow. Raises LinkLost, ProtocolError."""
        messages = all_to_receiver(frame)
        self._pulse.heard()
        for message in messages:
            self._handle(message)

    def _handle(self, message: ToReceiver) -> None:
        match message:
            case Offer():
                self._offer(message)
            case Filling():
                self._filling(message)
            case Header():
                self._header(message)
            case Return():
                self._grants.take_back(message.slab, message.grant)
            case Abort():
                self._aborted(message)
            case Measure():
                self._probe.ask(message.slabs)
            case Sample():
                if self._grants.fill(LeaseId(PROBE_LEASE), message) is None:
                    self._counters.drop(Reason.FOREIGN)
            case Beat():
                pass
            case Proof():
                raise ProtocolError("a second proof")

    def turn(self) -> float:
        """Do what is due. Seconds until something is again, unless a message or a wake comes.

        Raises LinkLost, ProtocolError.
        """
        if self._retired:
            raise LinkLost("another link takes this one's place")
        if self._pulse.is_doubtful():
            return 0.0
        self._work()
        if self._wants or self._probe.is_running or not self._grants.is_idle:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = self._clock()
        timeout_s = self._options.progress_timeout_s
        overdue_in_s = self._grants.overdue_in_s(UNUSED_TIMEOUTS * timeout_s, timeout_s)
        if self._pulse.needs_beat():
            self._outbox.put(Beat())
        self._outbox.flush()
        return max(0.0, min(overdue_in_s, self._pulse.wait_s()))

    def _work(self) -> None:
        """All that is due but for what a clock brings."""
        for message in self._grants.filled():
            if self._grants.has_landed(message):
                self._take_in(message)
        while pulls := self._grants.to_pull():
            for message in pulls:
                self._pull(message)
        if self._has_news:
            self._has_news = False
            self._tell_ended()
        self._grant()

    def _leases_moved(self) -> None:
        """Some lease of this link ended, or may be scattered to again. Any thread calls it."""
        self._has_news = True
        self._channel.wake()

    def _offer(self, offer: Offer) -> None:
        lease = LeaseId(offer.lease)
        verdict = self._leases.offered(self._source, offer)
        if verdict.answer is not Answer.ACK:
            self._answer_ended(offer.key, lease, verdict)
            return
        self._offered[lease] = offer.key
        self._num_spare = self._most_spare
        if offer.slabs:
            # Whoever holds spare slabs uses them first: those of long ago must have been lost.
            for spare in self._grants.again(self._options.progress_timeout_s):
                self._outbox.put(spare)
        self._wants.offer(lease, offer.key, offer.slabs)

    def _filling(self, message: Filling) -> None:
        # The slab before it counts as followed until another one is; and its Ack must not wait.
        if self._grants.num_filled:
            self._work()
        self._outbox.flush()
        if message.is_sealed:
            self._ask_missing(message.header)
        shared = self._grants.being_filled(message)
        if shared is None:
            return
        verdict = self._scatter.follow(message, *shared)
        if verdict is not None:
            self._grants.take_back(message.slab, message.grant)
            self._reply(message, verdict)
        elif message.is_sealed:
            index = message.header.index
            self._outbox.put(Missing(lease=message.header.lease, begin=index, end=index + 1))

    def _header(self, message: Header) -> None:
        header = message.header
        self._ask_missing(header)
        news = self._grants.fill(LeaseId(header.lease), message)
        if news:
            return
        if news is None:
            # The memory has another use by now: do not look at it.
            recalled = self._leases.recall(self._source, header)
            if recalled is not None:
                self._reply(message, recalled)
        else:
            self._counters.drop(Reason.DUPLICATE)

    def _ask_missing(self, header: SlabHeader) -> None:
        """Ask for the headers that must have been lost before this one."""
        gap = self._leases.gap(self._source, header)
        if gap is not None:
            self._outbox.put(Missing(lease=header.lease, begin=gap.begin, end=gap.end))

    def _pull(self, message: Header | Sample) -> None:
        """Post a receive and say so, unless nobody wants the slab any more."""
        if isinstance(message, Header):
            header = message.header
            refusal = self._leases.refusal(self._source, header.key, LeaseId(header.lease))
            if refusal is not None:
                self._grants.take_back(message.slab, message.grant)
                self._reply(message, refusal)
                return
        self._grants.pull(message)
        self._outbox.put(Pull(slab=message.slab, grant=message.grant))

    def _take_in(self, message: Header | Sample) -> None:
        """Bring a slab whose bytes are here as far as it gets now."""
        if isinstance(message, Sample):
            self._outbox.put(self._probe.take_in(message, self._counters))
            return
        verdict = self._scatter.settle_followed(message) or self._write(message)
        if verdict.answer is Answer.WAIT:
            return
        self._grants.take_back(message.slab, message.grant)
        self._reply(message, verdict)

    def _write(self, message: Header) -> Verdict:
        """Scatter a slab, unless its lease is busy."""
        verdict = self._leases.claim(self._source, message.header)
        if verdict.answer is Answer.WAIT:
            self._counters.tally(Tally.WAIT)
            if self._grants.waited_s(message) >= self._options.progress_timeout_s:
                return self._leases.stuck(message.header)
        elif verdict.job is not None:
            return self._scatter.write(message, verdict, self._grants.bytes_of(message))
        return verdict

    def _reply(self, message: Filling | Header, verdict: Verdict) -> None:
        header, lease = message.header, LeaseId(message.header.lease)
        match verdict.answer:
            case Answer.ACK:
                if verdict.is_last:
                    self._forget(header.key, lease)
                self._outbox.put(Ack(lease=lease, index=header.index, grant=message.grant))
            case Answer.RESEND:
                self._wants.add_again(lease, header.key)
                self._outbox.put(Resend(lease=lease, index=header.index, grant=message.grant))
            case _:
                self._answer_ended(header.key, lease, verdict)

    def _grant(self) -> None:
        """Hand free slabs to the leases in turn; a probe, and what comes next, get what is left."""
        while self._grants.num_free and self._wants:
            lease, key = self._wants.first()
            refusal = self._leases.refusal(self._source, key, lease)
            if refusal is not None:
                self._answer_ended(key, lease, refusal)
                continue
            self._wants.served(lease)
            self._outbox.put(self._grants.give(lease))
        if self._probe.is_running and not self._wants:
            for credit in self._probe.grant():
                self._outbox.put(credit)
        if self._outbox or not self._grants.num_spare:
            # They ride on what is said anyway, unless there is none left.
            for spare in self._grants.give_spares(self._num_spare):
                self._outbox.put(spare)

    def _aborted(self, message: Abort) -> None:
        lease = LeaseId(message.lease)
        self._forget(message.key, lease)
        self._leases.abort(self._source, message.key, lease, message.detail or message.reason)

    def _tell_ended(self) -> None:
        """Tell the sender of ends that it did not bring about, so that it need not wait for its
        next message to hear of them.
        """
        for lease, key in list(self._offered.items()):
            refusal = self._leases.refusal(self._source, key, lease)
            if refusal is not None:
                self._answer_ended(key, lease, refusal)

    def _forget(self, key: AttemptKey, lease: LeaseId) -> None:
        if self._offered.get(lease) == key:
            del self._offered[lease]
        self._wants.forget(lease, key)

    def _answer_ended(self, key: AttemptKey, lease: LeaseId, verdict: Verdict) -> None:
        self._forget(key, lease)
        if verdict.answer is Answer.COMPLETE:
            self._outbox.put(Complete(key=key, lease=lease))
        else:
            reason = verdict.reason or Reason.ENDED
            self._outbox.put(Abort(key=key, lease=lease, reason=reason, detail=verdict.detail))
