"""The worker's end of the session: one bidirectional stream per router.

The reader only posts what arrives to the step loop, so no client can stop it; the writer only
drains the outbox. A session ends when its stream ends, when nothing was heard for ``silence_s``,
when the router takes no message for that long or lags beyond the outbox's bound; with it end all
sequences of that router on this worker.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from kvferry.core.errors import StartupError
from kvferry.core.ids import Incarnation
from kvferry.engine.loop import StepLoop
from kvferry.engine.outbox import Outbox
from kvferry.engine.ports import FromRouter, SessionClosed, SessionOpened
from kvferry.proto import worker_pb2 as pb
from kvferry.proto import worker_pb2_grpc
from kvferry.proto.session import MAX_MESSAGE_BYTES, PROTOCOL, SECRET_KEY

log = logging.getLogger(__name__)

RouterStream: TypeAlias = grpc.aio.ServicerContext  # of RouterMessage, WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How sessions are kept."""

    host: str
    secret: str
    beat_s: float
    silence_s: float


class SessionServer(worker_pb2_grpc.WorkerServicer):
    """Serves ``Worker.Session`` on a free port of one interface."""

    def __init__(self, loop: StepLoop, hello: pb.WorkerHello, settings: SessionSettings) -> None:
        self._loop = loop
        self._hello = hello
        self._settings = settings
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listen. Returns HOST:PORT. Raises StartupError."""
        size = ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)
        self._server = grpc.aio.server(options=[size, ("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        try:
            port = self._server.add_insecure_port(f"{self._settings.host}:0")
        except RuntimeError as error:
            pool = "prefill" if self._hello.role == "prefill" else "decode"
            message = f"{pool}.host: cannot listen on {self._settings.host}: {error}"
            raise StartupError(message) from None
        await self._server.start()
        return f"{self._settings.host}:{port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.5)

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.RouterMessage], context: RouterStream
    ) -> None:
        # Written as a coroutine, not a generator, whose writes could wait for ever.
        await self._authenticate(context)
        first = await self._read(request_iterator)
        hello = first.hello if first is not None else pb.RouterHello()
        if hello.protocol != PROTOCOL:
            reason = f"a hello in protocol {PROTOCOL} must come first"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        await self._write(context, pb.WorkerMessage(hello=self._hello))
        waker = _Waker()
        incarnation = Incarnation(hello.incarnation)
        outbox = Outbox(incarnation, lambda: self._loop.announce(waker.wake))
        self._loop.post(SessionOpened(outbox))
        reader = asyncio.create_task(self._post_all(request_iterator, outbox, waker))
        try:
            while not (reader.done() or outbox.overflowed):
                if await waker.wait(self._settings.beat_s):
                    outbox.send(pb.WorkerMessage(load=self._loop.load()))
                while (message := outbox.take()) is not None:
                    await self._write(context, message)
        except TimeoutError:
            log.warning("router %016x takes no messages", outbox.incarnation)
        finally:
            reader.cancel()
            outbox.close()
            self._loop.post(SessionClosed(outbox))
            log.info("session of router %016x ended", outbox.incarnation)

    async def _post_all(
        self, stream: AsyncIterator[pb.RouterMessage], outbox: Outbox, waker: _Waker
    ) -> None:
        try:
            while (message := await self._read(stream)) is not None:
                self._loop.post(FromRouter(outbox, message))
        finally:
            waker.wake()

    async def _write(self, context: RouterStream, message: pb.WorkerMessage) -> None:
        """Raises TimeoutError when the router does not take it."""
        async with asyncio.timeout(self._settings.silence_s):
            await context.write(message)

    async def _read(self, stream: AsyncIterator[pb.RouterMessage]) -> pb.RouterMessage | None:
        """The next message; None when the stream ended or was silent for too long."""
        try:
            async with asyncio.timeout(self._settings.silence_s):
                return await anext(stream, None)
        except TimeoutError:
            return None

    async def _authenticate(self, context: RouterStream) -> None:
        given = dict(context.invocation_metadata() or ()).get(SECRET_KEY, "")
        if not hmac.compare_digest(str(given).encode(), self._settings.secret.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong cluster secret")


class _Waker:
    """Lets any thread wake one coroutine, which also wakes at every beat."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._next_beat_s = self._loop.time()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, beat_s: float) -> bool:
        """Wait for a wake or the next beat. True when the beat is due."""
        try:
            async with asyncio.timeout_at(self._next_beat_s):
                await self._event.wait()
        except TimeoutError:
            pass
        self._event.clear()
        now = self._loop.time()
        if now < self._next_beat_s:
            return False
        self._next_beat_s = now + beat_s
        return True
