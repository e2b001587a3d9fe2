"""One attempt on the workers chosen for it: a context whose exit releases every side.

    RemotePair   Reserve on D ─▶ Prefill on P ══KV══▶ D, Start on D ─▶ tokens from D
    LocalPair    Reserve on D ─▶ Prefill on D ─▶ tokens from D
    PrefillOnly  Prefill on P, whose first token is the last
    ForkedPair   Reserve on the D of another choice, its first token from there too, Start ─▶ tokens

Four small classes rather than one with flags; the spine cannot tell them apart.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

from kvferry.core.errors import AttemptFailed, ProtocolError, WorkerBusy
from kvferry.core.request import FinishReason, Timeline, TokenStep
from kvferry.proto import worker_pb2 as pb
from kvferry.router.mailbox import Mailbox
from kvferry.router.progress import Progress
from kvferry.router.session import WorkerSession, token_logprob
from kvferry.router.siblings import FirstTokens, Place, Siblings
from kvferry.router.side import Side

AnotherPrefill = Callable[[Progress, set[WorkerSession]], Awaitable[WorkerSession]]
"""Waits for a prefill worker that may take the prompt after the given ones were busy."""


class Pair(Protocol):
    """An attempt. Entering it reserves, leaving it releases."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    async def prefill(self) -> TokenStep:
        """The first token. Raises AttemptFailed."""
        ...

    async def decode(self) -> TokenStep | None:
        """The next tokens; None after the last. Raises AttemptFailed."""
        ...


class _Attempt:
    """What the three kinds share: the mailbox, the timeline, and reading one from the other."""

    def __init__(self, progress: Progress, timeline: Timeline) -> None:
        self.progress = progress
        self.spec = progress.spec()
        self.timeline = timeline
        self.mailbox = Mailbox()
        self.finished = False

    async def granted(self, side: Side) -> pb.Granted:
        started = time.monotonic()
        reply = await self.mailbox.next()
        if isinstance(reply, TokenStep) or not reply.HasField("granted"):
            raise ProtocolError("a reservation was answered by something else")
        side.granted()
        self.timeline.reserve_s += time.monotonic() - started
        self.timeline.cached_tokens_decode = reply.granted.cached_tokens
        self.timeline.decode_worker = side.view.worker_id
        return reply.granted

    async def prefill_done(self) -> pb.PrefillDone | None:
        """None when the worker was busy instead."""
        reply = await self.mailbox.next()
        if isinstance(reply, TokenStep) or not (
            reply.HasField("prefill_done") or reply.HasField("busy")
        ):
            raise ProtocolError("a prefill was answered by something else")
        return reply.prefill_done if reply.HasField("prefill_done") else None

    def first_token(self, side: Side, done: pb.PrefillDone) -> TokenStep:
        side.prefilled()
        timeline = self.timeline
        timeline.prefill_wait_s += done.wait_s
        timeline.prefill_s += done.compute_s
        timeline.cached_tokens_prefill = done.cached_tokens
        timeline.prefill_worker = side.view.worker_id
        step = _first_step(done)
        self.finished = step.finish_reason is not None
        return step

    def meet(self, decode: Side | None) -> None:
        """Tell the other choices of the prompt where its KV will be."""
        siblings = self.progress.siblings
        if siblings is not None and not self.progress.sample_index:
            holder = decode.session if decode is not None else None
            siblings.meet(Place(self.progress.key(), holder))

    def share(self, done: pb.PrefillDone, prefill: Side) -> None:
        """Leave the other choices their first tokens."""
        siblings = self.progress.siblings
        if siblings is not None and len(done.more) == siblings.num_choices - 1:
            steps = [_first_step(first) for first in done.more]
            siblings.share(FirstTokens(steps, prefill.view.worker_id))

    async def next_tokens(self, side: Side) -> TokenStep | None:
        while not self.finished:
            item = await self.mailbox.next()
            if isinstance(item, TokenStep):
                self.finished = side.over = item.finish_reason is not None
                return item
            self._note(item)
        return None

    def _note(self, message: pb.WorkerMessage) -> None:
        """What the two sides say of the transfer, each for itself."""
        timeline = self.timeline
        if message.HasField("decode_ready"):
            account = message.decode_ready.account
            timeline.transfer_transport = account.transport or timeline.transfer_transport
            timeline.transfer_bytes += account.nbytes
            timeline.transfer_scatter_s += account.busy_s
            timeline.transfer_wall_s += account.wall_s
            timeline.transfer_exposed_s += message.decode_ready.exposed_s
        elif message.HasField("sent"):
            account = message.sent.account
            timeline.transfer_packed_bytes += account.nbytes
            timeline.transfer_pack_s += account.busy_s
            timeline.transfer_wire_s += account.wire_s
            timeline.transfer_credit_s += account.credit_s
            timeline.transfer_resends += account.resends


class _Prefill:
    """The prefill worker of an attempt; where one has no room, another takes its place."""

    def __init__(self, attempt: _Attempt, session: WorkerSession, another: AnotherPrefill) -> None:
        self.side = Side(session, attempt.progress, attempt.mailbox)
        self._attempt = attempt
        self._another = another
        self._busy: set[WorkerSession] = set()

    def claim(self) -> None:
        self.side.claim_prompt(len(self._attempt.spec.token_ids))

    async def run(self, target: pb.Target | None) -> pb.PrefillDone:
        self.side.prefill(self._attempt.spec, target)
        while (done := await self._attempt.prefill_done()) is None:
            await self._move()
            self.side.prefill(self._attempt.spec, target)
        return done

    async def _move(self) -> None:
        """It had no room: go to another, or to this one once it has. What D holds stays held."""
        self.side.over = True
        self.side.release()
        self._busy.add(self.side.session)
        attempt = self._attempt
        session = await self._another(attempt.progress, self._busy)
        self.side = Side(session, attempt.progress, attempt.mailbox)
        self.claim()


class RemotePair:
    """Prefill and decode on different workers, KV shipped between them."""

    def __init__(
        self,
        progress: Progress,
        timeline: Timeline,
        prefill: WorkerSession,
        decode: WorkerSession,
        another_prefill: AnotherPrefill,
    ) -> None:
        self._attempt = _Attempt(progress, timeline)
        self._prefill = _Prefill(self._attempt, prefill, another_prefill)
        self._decode = Side(decode, progress, self._attempt.mailbox)
        self._target = pb.Target()

    async def __aenter__(self) -> Self:
        self._prefill.claim()
        self._decode.reserve(self._attempt.spec)
        try:
            granted = await self._attempt.granted(self._decode)
        except BaseException:
            await self.__aexit__()
            raise
        hello = self._decode.view.hello
        self._target = pb.Target(
            peer=hello.incarnation,
            endpoints=hello.kv_endpoints,
            lease=granted.lease,
            cached_tokens=granted.cached_tokens,
            layout=hello.layout,
            wire=hello.kv_wire,
            root_hash=hello.root_hash,
        )
        self._attempt.meet(self._decode)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._prefill.side.release()
        self._decode.release()

    async def prefill(self) -> TokenStep:
        attempt = self._attempt
        done = await self._prefill.run(self._target)
        step = attempt.first_token(self._prefill.side, done)
        self._prefill.side.over = attempt.finished
        if not attempt.finished:
            # Before the client hears of the token: decode must never wait for a client.
            self._decode.start(done.token_id)
        attempt.share(done, self._prefill.side)
        return step

    async def decode(self) -> TokenStep | None:
        step = await self._attempt.next_tokens(self._decode)
        # Tokens come after all KV was verified, and P's part ended with that.
        self._prefill.side.over = True
        return step


class LocalPair:
    """Prefill and decode on one worker: same life, no transfer."""

    def __init__(self, progress: Progress, timeline: Timeline, worker: WorkerSession) -> None:
        self._attempt = _Attempt(progress, timeline)
        self._side = Side(worker, progress, self._attempt.mailbox)

    async def __aenter__(self) -> Self:
        self._side.claim_prompt(len(self._attempt.spec.token_ids))
        self._side.reserve(self._attempt.spec, local=True)
        try:
            await self._attempt.granted(self._side)
        except BaseException:
            self._side.release()
            raise
        self._attempt.meet(self._side)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._side.release()

    async def prefill(self) -> TokenStep:
        self._side.prefill(self._attempt.spec, None)
        done = await self._attempt.prefill_done()
        if done is None:
            self._side.over = True
            raise WorkerBusy(f"worker {self._side.view.worker_id} has no room")
        step = self._attempt.first_token(self._side, done)
        self._side.over = self._attempt.finished
        self._attempt.share(done, self._side)
        return step

    async def decode(self) -> TokenStep | None:
        return await self._attempt.next_tokens(self._side)


class PrefillOnly:
    """Nothing follows the first token, so that no decode worker is asked."""

    def __init__(
        self,
        progress: Progress,
        timeline: Timeline,
        prefill: WorkerSession,
        another_prefill: AnotherPrefill,
    ) -> None:
        self._attempt = _Attempt(progress, timeline)
        self._prefill = _Prefill(self._attempt, prefill, another_prefill)

    async def __aenter__(self) -> Self:
        self._prefill.claim()
        self._attempt.meet(None)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._prefill.side.release()

    async def prefill(self) -> TokenStep:
        done = await self._prefill.run(target=None)
        side = self._prefill.side
        step = self._attempt.first_token(side, done)
        side.over = True
        self._attempt.share(done, side)
        return step

    async def decode(self) -> TokenStep | None:
        if not self._attempt.finished:
            raise ProtocolError("the last token came without a finish reason")
        return None


class ForkedPair:
    """A choice whose prompt another one brings: it reserves as its fork, and waits for it."""

    def __init__(
        self, progress: Progress, timeline: Timeline, siblings: Siblings, place: Place
    ) -> None:
        self._attempt = _Attempt(progress, timeline)
        self._siblings = siblings
        self._place = place
        self._side: Side | None = None
        self._first_token: int | None = None
        """Until the worker knows it."""
        if place.decode is not None:
            self._side = Side(place.decode, progress, self._attempt.mailbox)

    async def __aenter__(self) -> Self:
        if self._side is not None:
            self._side.reserve(self._attempt.spec, fork_of=self._place.parent)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._side is not None:
            self._side.release()

    async def prefill(self) -> TokenStep:
        attempt = self._attempt
        firsts = await self._siblings.firsts()
        if firsts is None:
            raise AttemptFailed("the choice that was to bring the prompt has failed")
        step = firsts.steps[attempt.progress.sample_index - 1]
        attempt.timeline.prefill_worker = firsts.worker_id
        attempt.finished = step.finish_reason is not None
        self._first_token = step.token_ids[0]
        return step

    async def decode(self) -> TokenStep | None:
        attempt, side = self._attempt, self._side
        if attempt.finished:
            return None
        if side is None:
            raise ProtocolError("the last token came without a finish reason")
        if self._first_token is not None:
            await attempt.granted(side)
            side.start(self._first_token)
            self._first_token = None
        return await attempt.next_tokens(side)


def _first_step(first: pb.PrefillDone | pb.FirstToken) -> TokenStep:
    reason = FinishReason(first.finish_reason) if first.finish_reason else None
    logprobs = (token_logprob(first.logprob),) if first.HasField("logprob") else ()
    return TokenStep((first.token_id,), logprobs, reason)
