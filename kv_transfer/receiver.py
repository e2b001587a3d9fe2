"""The receiving side: takes slabs from links, verifies them and scatters them into leased blocks.

No peer ever writes into the paged cache: it fills slabs that belong to its link, and only what the
lease table allows is scattered. Threads: one that keeps the leases' deadlines, one per listener and
one per link.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvferry.core.errors import ConfigError
from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import Reason, ReceiveEvent, ReceiveJob
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.receiver_links import ReceiverLinks
from kvferry.kv_transfer.threads import join_all
from kvferry.kv_transfer.transport import Listener

TICK_S = 0.25
"""How late a deadline may be noticed."""


class KvReceiver:
    """Receives KV into the cache of one rank of a worker."""

    def __init__(
        self,
        memory: KvMemory,
        options: LinkOptions,
        on_event: Callable[[ReceiveEvent], None],
        listeners: Sequence[Listener],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at once. Takes ownership of ``listeners``.

        Raises ConfigError when a slab could not hold one token of one layer.
        """
        layout = memory.layout
        needed = 2 * layout.shard(memory.rank).heads.length * layout.head_bytes
        if options.slab_bytes < needed:
            for listener in listeners:
                listener.close()
            raise ConfigError("transfer.slab", f"must be at least {needed} bytes for this model")
        self._listeners = tuple(listeners)
        self._leases = LeaseTable(layout, memory.rank, on_event, clock)
        self._closing = threading.Event()
        self._links = ReceiverLinks(memory, options, self._leases, self._closing, clock)
        self._threads = [threading.Thread(target=self._keep_time, name="kv-receiver-clock")]
        self._threads += [
            threading.Thread(
                target=self._listen, args=(listener,), name=f"kv-receiver {listener.endpoint}"
            )
            for listener in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where senders connect, in the order of the listeners."""
        return tuple(listener.endpoint for listener in self._listeners)

    @property
    def counters(self) -> Counter[Reason]:
        """Offers and slabs dropped so far, by reason. A copy, for any thread."""
        return self._leases.counters.dropped

    @property
    def tallies(self) -> Counter[Tally]:
        """What happened so far that is no failure. A copy, for any thread."""
        return self._leases.counters.tallies

    @property
    def num_links(self) -> int:
        """Links open now."""
        return self._links.count

    def expect(self, job: ReceiveJob) -> None:
        """Register a live lease before the sender hears of it.

        Raises ValueError when its id is live already, KeyError for an unknown element type,
        RuntimeError after close.
        """
        if self._closing.is_set():
            raise RuntimeError("the receiver is closed")
        self._leases.expect(job)

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        """Move the deadline of a lease, unless it has ended."""
        self._leases.renew(lease, deadline_s)

    def release(self, lease: LeaseId) -> None:
        """End a lease: ReceiveClosed follows, unless it has ended already. Idempotent."""
        self._leases.release(lease)

    def close(self, timeout_s: float = 10.0) -> None:
        """Close all links, join the threads, fail live leases.

        Raises TimeoutError when a thread does not end: what it scatters to fails once it returns.
        """
        self._closing.set()
        for listener in self._listeners:
            listener.stop()
        try:
            join_all([*self._threads, *self._links.stop()], timeout_s)
        finally:
            self._leases.close()

    def _keep_time(self) -> None:
        while not self._closing.wait(TICK_S):
            self._leases.expire()

    def _listen(self, listener: Listener) -> None:
        try:
            while not self._closing.is_set():
                channel = listener.accept(TICK_S)
                if channel is not None:
                    self._links.adopt(channel)
        finally:
            listener.close()
