"""The router's end of the session with one worker, kept up for as long as the router lives.

It reads everything the worker says and sorts it: replies and tokens into the mailboxes of the
requests they belong to, cache events into the prefix index, load into the worker's view. When the
session ends, every mailbox hears of it, the index forgets the worker, and a new session is tried.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.core.errors import ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.core.request import FinishReason, TokenLogprob, TokenStep
from kvferry.proto import worker_pb2 as pb
from kvferry.proto.session import PROTOCOL
from kvferry.router.index import PrefixIndex
from kvferry.router.mailbox import Lost, Mailbox
from kvferry.router.transfers import TransferTotals
from kvferry.router.workers import WorkerState, WorkerView

log = logging.getLogger(__name__)

AttemptOfRequest = tuple[int, int]


class Stream(Protocol):
    """One open stream to a worker. ``router.channel`` has the gRPC one, tests have a fake."""

    async def write(self, message: pb.RouterMessage) -> None: ...

    async def read(self) -> pb.WorkerMessage | None:
        """The next message; None when the stream has ended, for whatever reason."""
        ...

    async def close(self) -> None: ...


class Dial(Protocol):
    """Opens a stream. Raises OSError when the worker cannot be reached."""

    async def __call__(self, address: str) -> Stream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionContext:
    """What all sessions of a router share."""

    incarnation: Incarnation
    dial: Dial
    index: PrefixIndex
    accept: Callable[[WorkerView], str]
    """Why a worker whose hello has come does not fit the others; empty when it does."""
    changed: Callable[[], None]
    """Called when a worker's load has changed."""
    came_or_left: Callable[[], None]
    """Called when a worker's state has changed."""
    transfers: TransferTotals
    links: Callable[[WorkerView, pb.Links], None]
    """Called with what a worker measured of its ways to another one."""
    beat_s: float
    silence_s: float


class WorkerSession:
    """Messages to and from one worker."""

    def __init__(self, view: WorkerView, context: SessionContext) -> None:
        self.view = view
        self._context = context
        self._outbox: asyncio.Queue[pb.RouterMessage] = asyncio.Queue()
        self._mailboxes: dict[AttemptOfRequest, Mailbox] = {}
        self._heard_s = 0.0
        self._delta_sequence = 0

    def register(self, key: pb.Key, mailbox: Mailbox) -> None:
        """Route what the worker says of this attempt to ``mailbox``."""
        self._mailboxes[key.request, key.attempt] = mailbox
        if not self.view.routable:
            mailbox.put(Lost(self.view.worker_id))

    def forget(self, key: pb.Key) -> None:
        self._mailboxes.pop((key.request, key.attempt), None)

    def changed(self) -> None:
        """What the router counts on this worker has changed."""
        self._context.changed()

    def send(self, message: pb.RouterMessage) -> None:
        """Dropped without a session: whoever sends has registered, and hears of the loss."""
        if self.view.routable:
            self._outbox.put_nowait(message)

    async def run(self) -> None:
        """Keep a session up until cancelled."""
        delay_s = 0.05
        while True:
            try:
                stream = await self._context.dial(self.view.address)
            except OSError as error:
                self._lose(f"cannot be reached: {error}")
            else:
                try:
                    await self._serve(stream)
                except (
                    ProtocolError,
                    ValueError,
                ) as error:  # ValueError: not in a vocabulary of ours
                    self._lose(str(error), WorkerState.REFUSED)
                    delay_s = self._context.silence_s
                except TimeoutError:
                    self._lose("it did not say hello")
                else:
                    self._lose("its session ended")
                    delay_s = 0.05
                finally:
                    await stream.close()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._context.silence_s)

    async def _serve(self, stream: Stream) -> None:
        hello = pb.RouterHello(incarnation=self._context.incarnation, protocol=PROTOCOL)
        self._outbox = asyncio.Queue()
        await stream.write(pb.RouterMessage(hello=hello))
        # Not wait_for: before Python 3.12 it can swallow a cancellation.
        async with asyncio.timeout(self._context.silence_s):
            first = await stream.read()
        if first is None:
            return
        self._welcome(first)
        tasks = [
            asyncio.create_task(job)
            for job in (self._read_all(stream), self._write_all(stream), self._beat())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _welcome(self, message: pb.WorkerMessage) -> None:
        if message.WhichOneof("kind") != "hello":
            raise ProtocolError("a worker must say hello first")
        view = self.view
        view.hello = message.hello
        view.worker_id = message.hello.worker_id
        if message.hello.protocol != PROTOCOL:
            raise ProtocolError(f"protocol {message.hello.protocol}, this router speaks {PROTOCOL}")
        refusal = self._context.accept(view)
        if refusal:
            raise ProtocolError(refusal)
        view.state, view.reason = WorkerState.CATCHING_UP, ""
        self._context.came_or_left()

    async def _read_all(self, stream: Stream) -> None:
        clock = asyncio.get_running_loop().time
        self._heard_s = clock()
        while (message := await stream.read()) is not None:
            self._heard_s = clock()
            self._sort(message)

    async def _write_all(self, stream: Stream) -> None:
        while True:
            await stream.write(await self._outbox.get())

    async def _beat(self) -> None:
        """Renew all leases every beat; end the session when the worker is silent."""
        clock = asyncio.get_running_loop().time
        while clock() - self._heard_s < self._context.silence_s:
            keys = [pb.Key(request=r, attempt=a) for r, a in self._mailboxes]
            self.send(pb.RouterMessage(renew=pb.Renew(keys=keys)))
            await asyncio.sleep(self._context.beat_s)

    def _sort(self, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "tokens":
            self._deliver(message.tokens)
        elif kind == "load":
            self.view.load = message.load
            self._context.changed()
        elif kind == "cache_delta":
            self._cache_delta(message.cache_delta)
        elif kind == "links":
            self._context.links(self.view, message.links)
        elif kind is not None and kind != "hello":
            self._context.transfers.note(message)
            key = getattr(message, kind).key
            mailbox = self._mailboxes.get((key.request, key.attempt))
            if mailbox is not None:
                mailbox.put(message)

    def _deliver(self, tokens: pb.Tokens) -> None:
        reasons = {(f.key.request, f.key.attempt): FinishReason(f.reason) for f in tokens.finished}
        last = {
            pair: i for i, pair in enumerate(zip(tokens.requests, tokens.attempts, strict=True))
        }
        logprobs = list(tokens.logprobs) or None
        for i, pair in enumerate(zip(tokens.requests, tokens.attempts, strict=True)):
            mailbox = self._mailboxes.get(pair)
            if mailbox is None:
                continue
            step = TokenStep(
                (tokens.token_ids[i],),
                (token_logprob(logprobs[i]),) if logprobs and logprobs[i].ByteSize() else (),
                reasons.get(pair) if last[pair] == i else None,
            )
            mailbox.put(step)

    def _cache_delta(self, delta: pb.CacheDelta) -> None:
        index, number = self._context.index, self.view.number
        if delta.snapshot:
            self._delta_sequence = delta.sequence
            if delta.last:
                self.view.state = WorkerState.READY
        elif delta.sequence != self._delta_sequence + 1:
            raise ProtocolError(
                f"cache delta {delta.sequence} after {self._delta_sequence}: one was lost"
            )
        self._delta_sequence = delta.sequence
        index.add(number, delta.added)
        index.remove(number, delta.removed)

    def _lose(self, reason: str, state: WorkerState = WorkerState.LOST) -> None:
        view = self.view
        if view.reason != reason:
            log.warning("worker %s at %s: %s", view.worker_id or view.role, view.address, reason)
        view.state, view.reason = state, reason
        self._context.index.forget(view.number)
        for mailbox in self._mailboxes.values():
            mailbox.put(Lost(view.worker_id))
        self._context.came_or_left()


def token_logprob(message: pb.Logprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)
