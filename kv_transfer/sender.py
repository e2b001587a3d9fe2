"""The sending side: packs leased blocks into slabs that receivers grant. One thread and one link
per rank of a receiver.

A link belongs to one incarnation of a receiver. It is opened by the first job for it, kept while
the peer beats, and forgotten when it is lost with nothing left to send; the next job opens a new
one, over whichever endpoint is the choice then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from kvferry.core.errors import TransferFailed
from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import Reason, SendEvent, SendJob
from kvferry.kv_transfer.layout import KvLayout, Shard, head_nbytes
from kvferry.kv_transfer.lessons import Lessons
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.outgoing import Owed, Progress, Transfer, TransferTable
from kvferry.kv_transfer.plan import parts, wire_dtype
from kvferry.kv_transfer.probe import measure
from kvferry.kv_transfer.prober import Probed, Prober
from kvferry.kv_transfer.push import Prompt, Push, PushPolicy
from kvferry.kv_transfer.sender_link import SenderLink, SenderParts
from kvferry.kv_transfer.threads import join_all
from kvferry.kv_transfer.transport import Connect


class Peer(NamedTuple):
    """One rank of one life of a receiver."""

    incarnation: Incarnation
    rank: int


class KvSender:
    """Sends KV out of one rank's cache."""

    def __init__(
        self,
        memory: KvMemory,
        options: LinkOptions,
        on_event: Callable[[SendEvent], None],
        connect: Connect = connect_any,
        clock: Callable[[], float] = time.monotonic,
        push: Push = Push.AUTO,
        choices: Choices | None = None,
        on_probed: Callable[[Probed], None] = lambda probed: None,
    ) -> None:
        """``on_probed`` hears what ``probe`` found, on a thread of its own."""
        self.choices = choices = choices or Choices()
        self._memory = memory
        self._push = PushPolicy(push)
        self._lessons = Lessons(self._push)
        self._table = TransferTable(on_event, clock, options.progress_timeout_s, self._lessons.sent)
        self._parts = SenderParts(
            memory,
            self._table,
            options,
            connect,
            choices.choose,
            clock,
            failed=self._failed,
            works=choices.works,
        )
        self._prober = Prober(
            choices,
            lambda endpoint: measure(endpoint, connect, options, memory.rank, memory.digests),
            self._probed,
        )
        self._on_probed = on_probed
        self._clock = clock
        self._lock = threading.Lock()
        self._links: dict[Peer, _LinkThread] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def num_links(self) -> int:
        """Ranks of receivers with a link, or one being opened."""
        with self._lock:
            return len(self._links)

    def send(self, job: SendJob) -> None:
        """Begin a transfer of which all is computed. As ``begin``."""
        self.begin(job)
        self.computed(job.key, self._memory.layout.num_layers, job.tokens.end)

    def begin(self, job: SendJob) -> None:
        """Begin a transfer of which nothing is computed yet; its terminal event follows, at once
        when this rank owes that rank nothing. Does not wait, nor wake the link: ``computed`` does.

        Raises ValueError when the attempt is being sent to that rank already, RuntimeError after
        close.
        """
        owed, fault, reason = Owed((), 0, 0.0), "", Reason.MISMATCH
        try:
            owed = self._owed(job)
        except TransferFailed as error:
            fault = str(error)
        with self._lock:
            if self._closed:
                raise RuntimeError("the sender is closed")
            transfer = self._table.add(job, owed)
            if owed.parts and not self._post(transfer):
                fault, reason = "there is no thread for another link", Reason.INTERNAL
        if fault:
            self._table.fail(transfer, reason, fault)
        elif not owed.parts:
            self._table.succeed(transfer)

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None:
        """Tokens before ``tokens_end`` are computed in layers before ``layers_end``, and those of
        earlier chunks in all layers. ``after``: an event of the device that their contents wait
        for. Cheap; never waits. Nothing happens to a transfer that has ended.

        Said of all a second time, it means that the first token stands too: what the sender learns
        from that is how much of a send goes unnoticed.
        """
        progress, now = Progress(layers_end, tokens_end, after), self._clock()
        transfers = self._table.of(key)
        known = [transfer for transfer in transfers if transfer.computed_s is not None]
        if known or not transfers:
            self._lessons.first_token(key, known, now)
        for transfer in transfers:
            if transfer.report(progress, now):
                transfer.wake()

    def abort(self, key: AttemptKey) -> None:
        """End an attempt's transfers: SendAborted follows for each that is live, once the pack that
        runs has returned. Idempotent.
        """
        for transfer in self._table.abort(key):
            transfer.wake()

    def probe(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> None:
        """Measure all paths to a rank of a receiver and prefer the fastest from then on. Does not
        wait; disturbs no transfer.
        """
        self._prober.probe(peer, rank, endpoints)

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail live transfers, close all links, join the threads.

        Raises TimeoutError when one does not end.
        """
        with self._lock:
            self._closed = True
            entries, threads = list(self._links.values()), list(self._threads)
        for entry in entries:
            entry.link.stop()
        join_all([*threads, *self._prober.stop()], timeout_s)

    def _failed(
        self, peer: Incarnation, rank: int, endpoints: tuple[str, ...], endpoint: str, why: str
    ) -> bool:
        """A path broke. Whether there is another."""
        path = self.choices.failed(peer, rank, endpoint, why)
        has_other = self.choices.has_other(peer, rank)
        if path is not None and has_other:
            self._prober.broken(path, endpoints)
        return has_other

    def _probed(self, probed: Probed) -> None:
        chosen = next((path.endpoint for path in probed.paths if path.chosen), "")
        with self._lock:
            entry = self._links.get(Peer(probed.peer, probed.rank))
        if entry is not None:
            entry.link.prefer(chosen)
        self._on_probed(probed)

    def _owed(self, job: SendJob) -> Owed:
        """Raises TransferFailed for layouts or types that cannot be bridged."""
        source = self._memory.layout
        head_bytes = head_nbytes(source.head_dim, wire_dtype(source, job.target, job.wire))
        owed = _parts(source, self._memory.rank, job.target, job.target_rank)
        if not owed or not job.tokens.length:
            return Owed((), head_bytes, 0.0)
        prompt = Prompt(
            nbytes=job.tokens.length * sum(part.token_bytes(head_bytes) for part in owed),
            layers=owed[0].layers.length,
            tokens=job.tokens.length,
        )
        num_ranks = _num_ranks(source, job.target, job.target_rank)
        return Owed(owed, head_bytes, self._push.least_bytes(prompt), num_ranks)

    def _post(self, transfer: Transfer) -> bool:
        """Whether a link takes it in charge."""
        peer = Peer(transfer.job.peer, transfer.job.target_rank)
        entry = self._links.get(peer)
        if entry is not None:
            entry.link.post(transfer)
            return True
        entry = _LinkThread(self, peer, SenderLink(*peer, self._parts))
        entry.link.post(transfer)
        try:
            entry.thread.start()
        except RuntimeError:
            return False
        # It retires under the lock, which is held here.
        self._links[peer] = entry
        self._threads.add(entry.thread)
        return True

    def retire(self, entry: _LinkThread) -> bool:
        """A link with nothing left to send wants to end. False when a job came in meanwhile."""
        with self._lock:
            if entry.link.inbox:
                return False
            self._forget(entry)
            return True

    def broken(self, entry: _LinkThread) -> None:
        """A defect ended a link's thread: nothing more must come its way."""
        with self._lock:
            self._forget(entry)

    def _forget(self, entry: _LinkThread) -> None:
        del self._links[entry.peer]
        self._threads.discard(entry.thread)


class _LinkThread:
    """A link and the thread that runs it."""

    def __init__(self, sender: KvSender, peer: Peer, link: SenderLink) -> None:
        self.peer = peer
        self.link = link
        self._sender = sender
        name = f"kv-sender {peer.incarnation:016x}/{peer.rank}"
        self.thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        sound = False
        try:
            while True:
                self.link.run()
                if self._sender.retire(self):
                    sound = True
                    return
        finally:
            if not sound:
                # A defect ended the thread: no job may be left without an end.
                self._sender.broken(self)
                self.link.fail_all()


@lru_cache(maxsize=256)
def _parts(
    source: KvLayout, source_rank: int, target: KvLayout, target_rank: int
) -> tuple[Shard, ...]:
    return parts(source, source_rank, target, target_rank)


@lru_cache(maxsize=256)
def _num_ranks(source: KvLayout, target: KvLayout, target_rank: int) -> int:
    """Of the sender, that have a part for a rank of the receiver."""
    return sum(bool(_parts(source, rank, target, target_rank)) for rank in range(source.num_ranks))
