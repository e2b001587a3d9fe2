"""The sending side: packs leased blocks into slabs that receivers grant. One thread and one link
per endpoint.

A link is opened by the first job for its endpoint, kept while the peer beats, and forgotten when it
is lost with nothing left to send; the next job opens a new one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvferry.core.ids import AttemptKey
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import SendEvent, SendJob
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.outgoing import Transfer, TransferTable
from kvferry.kv_transfer.sender_link import SenderLink
from kvferry.kv_transfer.transport import Connect


class KvSender:
    """Sends KV out of one worker's cache."""

    def __init__(
        self,
        memory: KvMemory,
        options: LinkOptions,
        on_event: Callable[[SendEvent], None],
        connect: Connect = connect_any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._options = options
        self._connect = connect
        self._table = TransferTable(on_event, clock, options.progress_timeout_s)
        self._lock = threading.Lock()
        self._links: dict[str, _LinkThread] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def num_links(self) -> int:
        """Endpoints with a link, or one being opened."""
        with self._lock:
            return len(self._links)

    def send(self, job: SendJob) -> None:
        """Begin a transfer; its terminal event follows. Does not wait.

        Raises ValueError when the attempt is being sent already, RuntimeError after close.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the sender is closed")
            transfer = self._table.add(job)
            entry = self._links.get(job.endpoint)
            if entry is None:
                entry = self._links[job.endpoint] = _LinkThread(self, job.endpoint)
                self._threads.add(entry.thread)
                entry.inbox.append(transfer)
                entry.thread.start()
                return
            entry.inbox.append(transfer)
        entry.link.wake()

    def abort(self, key: AttemptKey) -> None:
        """End a transfer: SendAborted follows, after the pack that runs, unless it has ended.

        Idempotent.
        """
        self._table.abort(key)
        with self._lock:
            entries = list(self._links.values())
        for entry in entries:
            entry.link.wake()

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail live transfers, close all links, join the threads.

        Raises TimeoutError when one does not end.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            entries, threads = list(self._links.values()), list(self._threads)
        for entry in entries:
            entry.link.stop()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} does not end")

    def make_link(self, endpoint: str, inbox: deque[Transfer]) -> SenderLink:
        return SenderLink(
            lambda timeout_s: self._connect(endpoint, timeout_s),
            inbox,
            self._memory,
            self._table,
            self._options,
        )

    def retire(self, entry: _LinkThread) -> bool:
        """A link with nothing left to send wants to end. False when a job came in meanwhile."""
        with self._lock:
            if entry.inbox:
                return False
            self._forget(entry)
            return True

    def broken(self, entry: _LinkThread) -> None:
        """A defect ended a link's thread: nothing more must come its way."""
        with self._lock:
            self._forget(entry)

    def _forget(self, entry: _LinkThread) -> None:
        del self._links[entry.endpoint]
        self._threads.discard(entry.thread)


class _LinkThread:
    """A link, the jobs on their way to it, and the thread that runs it."""

    def __init__(self, sender: KvSender, endpoint: str) -> None:
        self.endpoint = endpoint
        self.inbox: deque[Transfer] = deque()
        self.link = sender.make_link(endpoint, self.inbox)
        self._sender = sender
        self.thread = threading.Thread(target=self._run, name=f"kv-sender {endpoint}")

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
