"""The receiving side: takes slabs from links, verifies them and scatters them into leased blocks.

No peer ever writes into the paged cache: it fills slabs that belong to its link, and only what the
lease table allows is scattered. Threads: one that accepts links and keeps the leases' deadlines,
and one per link.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from kvferry.core.errors import ConfigError, LinkLost, ProtocolError
from kvferry.core.ids import LeaseId
from kvferry.kv_transfer import handshake
from kvferry.kv_transfer.handshake import Greeted, LinkOptions
from kvferry.kv_transfer.jobs import Reason, ReceiveEvent, ReceiveJob
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.receiver_link import ReceiverLink
from kvferry.kv_transfer.transport import Channel, Listener

TICK_S = 0.25
"""How late a deadline may be noticed."""
SLABS_PER_LINK = 4
MAX_STRANGERS = 16
"""Connections that have not proved themselves yet, at once."""


class KvReceiver:
    """Receives KV into one worker's cache."""

    def __init__(
        self,
        memory: KvMemory,
        options: LinkOptions,
        on_event: Callable[[ReceiveEvent], None],
        listener: Listener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens at once. Takes ownership of ``listener``.

        Raises ConfigError when a slab could not hold one token of one layer.
        """
        if options.slab_bytes < memory.layout.layer_token_bytes:
            listener.close()
            needed = memory.layout.layer_token_bytes
            raise ConfigError("transfer.slab", f"must be at least {needed} bytes for this model")
        self._memory = memory
        self._options = options
        self._listener = listener
        self._leases = LeaseTable(memory.layout, on_event, clock)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._free_slabs = options.staging_bytes // options.slab_bytes
        self._channels: dict[threading.Thread, Channel] = {}
        self._strangers = 0
        self._thread = threading.Thread(target=self._run, name="kv-receiver")
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where senders connect."""
        return self._listener.endpoint

    @property
    def counters(self) -> Counter[Reason]:
        """Offers and slabs dropped so far, by reason."""
        return self._leases.counters

    def expect(self, job: ReceiveJob) -> None:
        """Register a live lease before the sender hears of it.

        Raises ValueError when its id is live already, RuntimeError after close.
        """
        if self._closing.is_set():
            raise RuntimeError("the receiver is closed")
        self._leases.expect(job)

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        """Move the deadline of a live lease."""
        self._leases.renew(lease, deadline_s)

    def release(self, lease: LeaseId) -> None:
        """End a lease: ReceiveClosed follows, unless it has ended already. Idempotent."""
        self._leases.release(lease)

    def tick(self) -> None:
        """Enforce the deadlines now. Its own thread does this every TICK_S."""
        self._leases.expire()

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail live leases, close all links, join the threads.

        Raises TimeoutError when one does not end.
        """
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._listener.stop()
        with self._lock:
            channels = dict(self._channels)
        for channel in channels.values():
            channel.wake()
        for thread in [self._thread, *channels]:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} does not end")
        self._leases.close(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                channel = self._listener.accept(TICK_S)
                self.tick()
                if channel is not None:
                    self._adopt(channel)
        finally:
            self._listener.close()

    def _adopt(self, channel: Channel) -> None:
        with self._lock:
            if self._strangers >= MAX_STRANGERS or self._closing.is_set():
                channel.close()
                return
            self._strangers += 1
            thread = threading.Thread(
                target=self._serve_link, args=(channel,), name="kv-receiver-link"
            )
            self._channels[thread] = channel
            # Started under the lock, so that close never meets a thread that it cannot join.
            thread.start()

    def _serve_link(self, channel: Channel) -> None:
        num_slabs = 0
        try:
            greeted = self._greet(channel)
            num_slabs = greeted.num_slabs
            ReceiverLink(channel, greeted, self._memory, self._leases, self._options).serve(
                self._closing
            )
        except (LinkLost, ProtocolError):
            # This connection ends and no other; the leases that it served wait for a new one.
            pass
        finally:
            channel.close()
            with self._lock:
                self._free_slabs += num_slabs
                del self._channels[threading.current_thread()]

    def _greet(self, channel: Channel) -> Greeted:
        try:
            proof, mac = handshake.challenge(channel, self._options)
        finally:
            with self._lock:
                self._strangers -= 1
        with self._lock:
            # Later links get fewer slabs, so that one more link is nearly always possible.
            num_slabs = min(SLABS_PER_LINK, -(-self._free_slabs // 2))
            self._free_slabs -= num_slabs
        if num_slabs == 0:
            handshake.refuse(channel, self._options, "no slab memory left for another link")
        try:
            return handshake.welcome(channel, self._options, proof, mac, num_slabs)
        except BaseException:
            with self._lock:
                self._free_slabs += num_slabs
            raise
