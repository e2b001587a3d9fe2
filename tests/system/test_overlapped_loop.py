"""What the step loop does while a device computes, and what it leaves alone until that is done."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_engine_model import expected
from hypothesis import given
from hypothesis import strategies as st
from late_runner import LateRunner
from local_system import fake_backend, local_config
from role_ports import ROUTER, prompt_spec

from kvferry.core.ids import AttemptKey, RequestId
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.engine.outbox import Outbox
from kvferry.engine.ports import FromRouter, SessionClosed, SessionOpened
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


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing() as made:
        yield made


@contextmanager
def closing(polls: int = 10**9) -> Iterator[Rig]:
    made = Rig(polls)
    try:
        yield made
    finally:
        made.worker.close_kv()


PROMPT = list(range(10, 19))


def test_a_cancelled_sequence_is_left_alone_until_its_step_is_done(rig: Rig) -> None:
    rig.start(1, PROMPT)
    in_use = rig.sequences.pool.counts().in_use
    seen = []

    def cancel_it(plan: object) -> None:
        rig.cancel(1)
        seen.append(rig.state(1))

    rig.late.meanwhile = cancel_it
    rig.loop.turn()
    # Settled: the step has run, and the cancel has yet to be taken in.
    assert rig.state(1) is State.DECODING
    assert rig.sequences.pool.counts().in_use >= in_use
    rig.late.meanwhile = lambda plan: None
    rig.loop.turn()
    assert (seen, rig.state(1)) == ([State.DECODING], None)
    assert rig.sequences.pool.counts().in_use == 0


def test_messages_that_touch_nothing_of_the_step_are_taken_in_while_it_computes(rig: Rig) -> None:
    rig.start(1, PROMPT)
    seen = []

    def reserve_another(plan: object) -> None:
        rig.late.meanwhile = lambda plan: None
        rig.reserve(2, PROMPT[:5])
        rig.late.runner = Before(rig.late.runner, lambda: seen.append(rig.state(2)))

    rig.late.meanwhile = reserve_another
    rig.turn(1)
    assert seen == [State.WAITING], "before the step was done"


def test_a_step_that_is_done_waits_for_no_message(rig: Rig) -> None:
    with closing(polls=1) as quick:
        quick.start(1, PROMPT)
        seen = []
        first = quick.late.runner

        def reserve_two(plan: object) -> None:
            quick.reserve(2, PROMPT[:5])
            quick.reserve(3, PROMPT[:6])
            quick.late.runner = Before(first, lambda: seen.append((quick.state(2), quick.state(3))))

        quick.late.meanwhile = reserve_two
        quick.loop.turn()
        assert seen == [(State.WAITING, None)]


@pytest.mark.parametrize("first", ["cancel", "closed", "later attempt"])
def test_no_message_overtakes_one_that_has_to_wait(rig: Rig, first: str) -> None:
    rig.start(1, PROMPT)
    seen = []

    def both(plan: object) -> None:
        rig.late.meanwhile = lambda plan: None
        if first == "cancel":
            rig.cancel(1)
        elif first == "closed":
            rig.loop.post(SessionClosed(rig.outbox))
        else:
            rig.reserve(1, PROMPT, attempt=2)
        rig.reserve(2, PROMPT[:5])
        rig.late.runner = Before(rig.late.runner, lambda: seen.append((rig.state(1), rig.state(2))))

    rig.late.meanwhile = both
    rig.turn(1)
    assert seen == [(State.DECODING, None)]
    rig.turn(1)
    assert rig.state(1) is None
    assert (rig.state(2) is None) is (first == "closed")


def test_output_leaves_while_the_next_step_computes(rig: Rig) -> None:
    rig.start(1, PROMPT)
    rig.turn(1)
    at_launch, at_end = [], []
    rig.late.meanwhile = lambda plan: at_launch.append(rig.wakes)
    rig.late.runner = Before(rig.late.runner, lambda: at_end.append(rig.wakes))
    for _ in range(3):
        rig.loop.turn()
    # The writer is woken once per step: after the next one was launched, before it is done.
    assert [end - start for start, end in zip(at_launch, at_end, strict=True)] == [1, 1, 1]
    assert at_launch[1:] == at_end[:-1], "nothing competes with planning"


def test_what_the_last_step_said_leaves_when_no_other_follows(rig: Rig) -> None:
    rig.start(1, PROMPT)
    while len(rig.tokens(1)) < 9:
        rig.turn(1)
    before = rig.wakes
    assert not rig.loop.turn()
    assert rig.wakes == before + 1


def test_a_step_that_fails_in_flight_fails_whoever_was_in_it(rig: Rig) -> None:
    rig.start(1, PROMPT)

    def fail() -> None:
        raise RuntimeError("the device is on fire")

    rig.late.runner = Before(rig.late.runner, fail)
    rig.turn(2)
    failed = [message.failed.message for message in rig.said if message.HasField("failed")]
    assert len(failed) == 1
    assert "on fire" in failed[0]
    assert rig.sequences.pool.counts().in_use == 0


def test_a_step_costs_the_same_however_many_requests_wait() -> None:
    def instructions(num_waiting: int) -> int:
        with closing() as full:
            for number in (1, 2):
                full.start(number, [number] * 100)
            for number in range(10, 10 + num_waiting):
                full.reserve(number, [90] * 60)
            full.turn(2)
            assert full.loop.role.counts()[:2] == (2, num_waiting)
            return executed(lambda: full.turn(3))

    assert instructions(900) == instructions(3)


def executed(work: Callable[[], None]) -> int:
    """Bytecode instructions that ``work`` takes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # whoever listens to collections, as Hypothesis does, would be counted
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


ACTIONS = st.lists(
    st.lists(st.tuples(st.sampled_from(["begin", "cancel", "again", "renew"]), st.integers(0, 6))),
    min_size=1,
    max_size=25,
)


@given(ACTIONS, st.integers(0, 3), st.data())
def test_tokens_are_those_of_a_loop_that_waits(
    script: list[list[tuple[str, int]]], polls: int, data: st.DataObject
) -> None:
    """Requests come and go before, between and during steps; the fake model checks, as late as it
    can, that all KV that a step names is there.
    """
    with closing(polls) as rig:
        asked = _Asked(rig)
        for actions in script:
            split = data.draw(st.integers(0, len(actions)))
            for action in actions[:split]:
                asked.do(*action)
            late = iter(actions[split:])
            rig.late.meanwhile = lambda plan, late=late: [asked.do(*a) for a in late] and None
            rig.turn(1)
            asked.answer()
        rig.late.meanwhile = lambda plan: None
        for _ in range(200):
            rig.turn(1)
            asked.answer()
        assert "failed" not in rig.kinds()
        for number, attempt in asked.wanted.items():
            assert rig.state(number, attempt) is None
            assert asked.output(number, attempt) == expected(asked.prompt(number), 9)
        counts = rig.sequences.pool.counts()
        assert counts.free + counts.cached == counts.total == NUM_BLOCKS


class _Asked:
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
