"""A worker whose steps are late, turned by hand, and a router's side of what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from late_runner import LateRunner
from local_system import fake_backend, local_config
from role_ports import ROUTER, prompt_spec

from kvferry.core.ids import AttemptKey, RequestId
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.outbox import Outbox
from kvferry.engine.ports import FromRouter, SessionOpened
from kvferry.engine.sequences import State
from kvferry.proto import worker_pb2 as pb

NUM_BLOCKS = 64


class Rig:
    """A worker of role both, turned by hand, whose steps are late; one router talks to it."""

    def __init__(self, polls: int = 10**9) -> None:
        self.now = 0.0
        self.wakes = 0
        self.said: list[pb.WorkerMessage] = []
        backend = fake_backend(4, NUM_BLOCKS)
        # The session's writer has its turn when the loop waits.
        self.late = LateRunner(Before(backend.runner, self.hear), polls=polls)
        config = local_config(
            prefill={"workers": 0}, decode={"role": "both", "reserve_queue": 1000}
        )
        backend = replace(backend, launcher=self.late)
        self.worker = DecodeWorker("both", config, backend, "secret", clock=lambda: self.now)
        self.loop = self.worker.loop
        self.sequences = self.loop.role.sequences
        self.outbox = Outbox(ROUTER, lambda: self.loop.announce(self._wake))
        self.loop.post(SessionOpened(self.outbox))

    def say(self, **kind: object) -> None:
        self.loop.post(FromRouter(self.outbox, pb.RouterMessage(**kind)))

    def reserve(self, number: int, prompt: list[int], attempt: int = 1) -> pb.Prefill:
        """Ask for room. Returns what asks for the tokens."""
        key, spec = pb.Key(request=number, attempt=attempt), prompt_spec(prompt)
        self.say(reserve=pb.Reserve(key=key, sequence=spec, local=True))
        return pb.Prefill(key=key, sequence=spec)

    def cancel(self, number: int, attempt: int = 1) -> None:
        self.say(cancel=pb.Cancel(key=pb.Key(request=number, attempt=attempt)))

    def start(self, number: int, prompt: list[int]) -> None:
        """A sequence that decodes from the next step on."""
        prefill = self.reserve(number, prompt)
        self.turn(1)
        self.say(prefill=prefill)
        self.turn(1)

    def turn(self, count: int) -> None:
        for _ in range(count):
            self.loop.turn()
            self.hear()

    def hear(self) -> None:
        while (message := self.outbox.take()) is not None:
            self.said.append(message)

    def state(self, number: int, attempt: int = 1) -> State | None:
        seq = self.sequences.get(AttemptKey(ROUTER, RequestId(number), attempt))
        return None if seq is None else seq.state

    def tokens(self, number: int) -> list[int]:
        """Output of a request so far."""
        found = []
        for message in self.said:
            if message.HasField("prefill_done") and message.prefill_done.key.request == number:
                found.append(message.prefill_done.token_id)
            pairs = zip(message.tokens.requests, message.tokens.token_ids, strict=True)
            found += [token for request, token in pairs if request == number]
        return found

    def kinds(self) -> list[str]:
        return [message.WhichOneof("kind") or "" for message in self.said]

    def _wake(self) -> None:
        self.wakes += 1


@contextmanager
def closing(polls: int = 10**9) -> Iterator[Rig]:
    made = Rig(polls)
    try:
        yield made
    finally:
        made.worker.close_kv()


class Asked:
    """A router's side: at most one live attempt of each request, and answers to Granted."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._attempts: dict[int, int] = {}
        self._prefills: dict[tuple[int, int], pb.Prefill] = {}
        self._heard = 0
        self.wanted: dict[int, int] = {}
        """Request -> attempt, of those that nobody cancelled."""

    def prompt(self, number: int) -> list[int]:
        return list(range(20, 25 + 2 * (number % 7)))

    def do(self, what: str, number: int) -> None:
        if what == "renew":
            keys = [pb.Key(request=n, attempt=a) for n, a in self.wanted.items()]
            self._rig.say(renew=pb.Renew(keys=keys))
        elif what == "cancel":
            if (attempt := self.wanted.pop(number, None)) is not None:
                self._rig.cancel(number, attempt)
        elif what == "again" or number not in self._attempts:
            attempt = self._attempts[number] = self._attempts.get(number, 0) + 1
            prefill = self._rig.reserve(number, self.prompt(number), attempt)
            self._prefills[number, attempt] = prefill
            self.wanted[number] = attempt

    def answer(self) -> None:
        for message in self._rig.said[self._heard :]:
            if message.HasField("granted"):
                key = message.granted.key
                if self.wanted.get(key.request) == key.attempt:
                    self._rig.say(prefill=self._prefills[key.request, key.attempt])
            if message.HasField("refused"):
                self.wanted.pop(message.refused.key.request)
            if message.HasField("failed") and message.failed.kind == "stale":
                raise AssertionError("a prefill came for a sequence that is gone")
        self._heard = len(self._rig.said)

    def output(self, number: int, attempt: int) -> list[int]:
        found = []
        for message in self._rig.said:
            first = message.prefill_done
            if message.HasField("prefill_done") and (first.key.request, first.key.attempt) == (
                number,
                attempt,
            ):
                found.append(first.token_id)
            tokens = message.tokens
            triples = zip(tokens.requests, tokens.attempts, tokens.token_ids, strict=True)
            found += [token for n, a, token in triples if (n, a) == (number, attempt)]
        return found


class Before:
    """A runner that looks around first."""

    def __init__(self, runner: object, look: Callable[[], object]) -> None:
        self._runner, self._look = runner, look

    def execute(self, plan, layer_done=None):
        self._look()
        return self._runner.execute(plan, layer_done)
