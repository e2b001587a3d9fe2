"""A router, told as the spine tells it: one generator per request, which waits for what workers
say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fake_engine_model import VOCAB_SIZE

from kvferry.core.ids import Incarnation
from kvferry.engine.fake_runner import fake_output
from kvferry.proto import worker_pb2 as pb

if TYPE_CHECKING:
    from kv_sim.session import Session
    from kv_sim.workers import Worker
    from kv_sim.world import World

MAX_ATTEMPTS = 6
"""Without a token between them."""
BEAT_S = 1.0
RETRY_S = 0.05

Item = pb.WorkerMessage | str
"""A reply, the name of a timer that is over, or ``lost``."""
Waiting = Generator[None, Item, None]


class AttemptOver(Exception):
    """This attempt has failed; the next one may follow."""


class Refused(Exception):
    """The request can never run: an honest error."""


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one client."""

    number: int
    prompt: list[int]
    max_tokens: int
    deadline_s: float
    """On the world's clock."""
    local: bool
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    given_back: int = 0
    born_s: float = 0.0
    outcome: str = ""
    expected: list[int] = field(default_factory=list)
    unread: deque[Item] = field(default_factory=deque)
    """What came while it slept."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.expected = fake_output(self.prompt, self.max_tokens, VOCAB_SIZE)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def key(self) -> pb.Key:
        return pb.Key(request=self.number, attempt=self.attempt)


class Router:
    """Requests, and sessions to workers."""

    def __init__(self, world: World, incarnation: int) -> None:
        self.world = world
        self.incarnation = Incarnation(incarnation)
        self.sessions: list[Session] = []
        self.requests: list[Request] = []
        self.dead = False
        self.renews = True
        self._spines: dict[int, Waiting] = {}
        self._mailboxes: dict[tuple[Session, int, int], Request] = {}
        self._over: set[tuple[Session, int, int]] = set()
        world.agenda.after(BEAT_S, self._beat)

    def is_up_with(self, workers: list[Worker]) -> bool:
        """Whether it has a session with each of these, and with nobody who is gone."""
        return all(s.routable and not s.closed for s in self.sessions) and {
            s.worker.name for s in self.sessions
        } == {worker.name for worker in workers}

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        request.born_s = self.world.agenda.now
        spine = self._spines[request.number] = self._spine(request)
        self._resume(request, spine, None)
        self.world.agenda.at(request.deadline_s, self._end, request, "deadline")

    def cancel(self, number: int) -> None:
        """The client is gone."""
        for request in self.requests:
            if request.number == number:
                self._end(request, "cancelled")

    def wants(self, session: Session, number: int, attempt: int) -> bool:
        """Whether this attempt still runs on that worker, or has to end there by itself."""
        side = (session, number, attempt)
        return side in self._mailboxes or side in self._over

    def _end(self, request: Request, outcome: str) -> None:
        spine = self._spines.get(request.number)
        if spine is not None:
            del self._spines[request.number]
            request.outcome = outcome
            spine.close()

    def die(self) -> None:
        """kill -9: its sessions end, and nobody waits for its requests any more."""
        self.dead = True
        self._spines.clear()
        self._mailboxes.clear()
        for session in list(self.sessions):
            session.cut()
        for request in self.requests:
            request.outcome = request.outcome or "router died"

    def hear(self, session: Session, message: pb.WorkerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "tokens":
            self._sort_tokens(session, message.tokens)
        elif kind not in ("cache_delta", "load", "hello", None):
            key = getattr(message, kind).key
            self._deliver(session, key.request, key.attempt, message)

    def lost(self, session: Session) -> None:
        if session in self.sessions:
            self.sessions.remove(session)
        for (found, number, attempt), _ in list(self._mailboxes.items()):
            if found is session:
                self._deliver(session, number, attempt, "lost")

    def _sort_tokens(self, session: Session, tokens: pb.Tokens) -> None:
        reasons = {(f.key.request, f.key.attempt): f.reason for f in tokens.finished}
        for number, attempt, token in zip(
            tokens.requests, tokens.attempts, tokens.token_ids, strict=True
        ):
            one = pb.Tokens(token_ids=[token])
            if (number, attempt) in reasons:
                one.finished.add(reason=reasons[number, attempt])
            self._deliver(session, number, attempt, pb.WorkerMessage(tokens=one))

    def _deliver(self, session: Session, number: int, attempt: int, item: Item) -> None:
        request = self._mailboxes.get((session, number, attempt))
        if request is not None:
            self._resume(request, self._spines[number], item)

    def _resume(self, request: Request, spine: Waiting, item: Item | None) -> None:
        if self.dead or self._spines.get(request.number) is not spine:
            return
        try:
            if item is None:
                next(spine)
            else:
                spine.send(item)
        except StopIteration:
            self._spines.pop(request.number, None)

    def _beat(self) -> None:
        if self.dead or self.world.closing:
            return
        if self.renews:
            keys: dict[Session, list[pb.Key]] = {session: [] for session in self.sessions}
            for session, number, attempt in self._mailboxes:
                keys.setdefault(session, []).append(pb.Key(request=number, attempt=attempt))
            for session, live in keys.items():
                if live:
                    session.to_worker(pb.RouterMessage(renew=pb.Renew(keys=live)))
        self.world.agenda.after(BEAT_S, self._beat)

    def _spine(self, request: Request) -> Waiting:
        failures = 0
        while True:
            request.attempt += 1
            request.unread.clear()
            known = len(request.tokens)
            try:
                yield from self._attempt(request)
                request.outcome = "done"
                return
            except Refused as error:
                request.outcome = f"refused: {error}"
                return
            except AttemptOver as error:
                failures = 1 if len(request.tokens) > known else failures + 1
                self.world.note("request %d.%d: %s", request.number, request.attempt, error)
                if failures == MAX_ATTEMPTS:
                    request.outcome = f"failed: {error}"
                    return
            if self.world.agenda.now >= request.deadline_s:
                request.outcome = "deadline"
                return
            yield from self._sleep(request, RETRY_S * 2**failures)

    def _sleep(self, request: Request, seconds: float) -> Waiting:
        spine = self._spines[request.number]
        self.world.agenda.after(seconds, self._resume, request, spine, "timer")
        while (item := (yield)) != "timer":
            request.unread.append(item)

    def _choose(self, prefill: bool) -> Session:
        found = [s for s in self.sessions if s.routable and s.worker.is_prefill == prefill]
        if not found:
            raise AttemptOver("no worker")
        return self.world.random.choice(found)

    def _attempt(self, request: Request) -> Waiting:
        left = request.max_tokens - len(request.output)
        spec = pb.SequenceSpec(
            token_ids=request.tokens,
            prompt_len=len(request.prompt),
            deadline_s=request.deadline_s - self.world.agenda.now,
            age_s=self.world.agenda.now - request.born_s,
            given_back=request.given_back,
            sampling=pb.Sampling(
                max_tokens=request.max_tokens, ignore_eos=True, top_p=1.0, repetition_penalty=1.0
            ),
        )
        sides: dict[Session, bool] = {}
        """True where the worker has ended its part by itself."""
        try:
            if request.local:
                yield from self._local(request, spec, sides)
            else:
                yield from self._remote(request, spec, sides, last=left == 1)
        finally:
            for session, over in sides.items():
                self._mailboxes.pop((session, request.number, request.attempt), None)
                if over:
                    self._over.add((session, request.number, request.attempt))
                else:
                    session.to_worker(pb.RouterMessage(cancel=pb.Cancel(key=request.key)))

    def _open(self, request: Request, sides: dict[Session, bool], session: Session) -> None:
        sides[session] = False
        self._mailboxes[session, request.number, request.attempt] = request

    def _remote(
        self, request: Request, spec: pb.SequenceSpec, sides: dict[Session, bool], *, last: bool
    ) -> Waiting:
        target = None
        if not last:
            decode = self._choose(prefill=False)
            self._open(request, sides, decode)
            decode.to_worker(pb.RouterMessage(reserve=pb.Reserve(key=request.key, sequence=spec)))
            reply = yield from self._reply(request, "granted")
            target = decode.worker.target(reply.granted)
            target.lease = self.world.lease_for(decode.worker, target.lease)
        while True:
            prefill = self._choose(prefill=True)
            self._open(request, sides, prefill)
            prefill.to_worker(
                pb.RouterMessage(prefill=pb.Prefill(key=request.key, sequence=spec, target=target))
            )
            reply = yield from self._reply(request, "prefill_done", "busy")
            if reply.HasField("prefill_done"):
                break
            del sides[prefill], self._mailboxes[prefill, request.number, request.attempt]
            yield from self._sleep(request, RETRY_S)
        if self._first(request, reply.prefill_done):
            sides[prefill] = True
            return
        token = reply.prefill_done.token_id
        decode.to_worker(pb.RouterMessage(start=pb.Start(key=request.key, token_id=token)))
        yield from self._decode(request, sides, decode)
        sides[prefill] = True

    def _local(
        self, request: Request, spec: pb.SequenceSpec, sides: dict[Session, bool]
    ) -> Waiting:
        decode = self._choose(prefill=False)
        self._open(request, sides, decode)
        reserve = pb.Reserve(key=request.key, sequence=spec, local=True)
        decode.to_worker(pb.RouterMessage(reserve=reserve))
        yield from self._reply(request, "granted")
        decode.to_worker(pb.RouterMessage(prefill=pb.Prefill(key=request.key, sequence=spec)))
        reply = yield from self._reply(request, "prefill_done")
        if self._first(request, reply.prefill_done):
            sides[decode] = True
            return
        yield from self._decode(request, sides, decode)

    def _first(self, request: Request, done: pb.PrefillDone) -> bool:
        """Whether it was the last as well."""
        self._add(request, done.token_id)
        return bool(done.finish_reason)

    def _decode(self, request: Request, sides: dict[Session, bool], decode: Session) -> Waiting:
        while True:
            reply = yield from self._reply(request, "tokens", "decode_ready", "sent")
            if reply.HasField("tokens"):
                self._add(request, reply.tokens.token_ids[0])
                if reply.tokens.finished:
                    sides[decode] = True
                    return

    def _add(self, request: Request, token: int) -> None:
        output = request.output
        right = request.expected[len(output) : len(output) + 1]
        if [token] != right:
            self.world.wrong(
                f"request {request.number}: token {len(output)} is {token}, not {right}"
            )
        request.tokens.append(token)

    def _reply(self, request: Request, *kinds: str) -> Generator[None, Item, pb.WorkerMessage]:
        """The next reply, which must be one of ``kinds``. Raises AttemptOver, Refused."""
        item = request.unread.popleft() if request.unread else (yield)
        if isinstance(item, str):
            raise AttemptOver(item)
        kind = item.WhichOneof("kind") or ""
        if kind in kinds:
            return item
        match kind:
            case "refused" if item.refused.never:
                raise Refused(item.refused.reason)
            case "refused":
                raise AttemptOver(item.refused.reason)
            case "preempted":
                request.given_back += 1
                raise AttemptOver("preempted")
            case "failed" if item.failed.kind == "refused":
                raise Refused(item.failed.message)
            case "failed":
                raise AttemptOver(f"{item.failed.kind}: {item.failed.message}")
        self.world.violation(f"request {request.number}: {kind} where {kinds} was due")
        raise AttemptOver(kind)
