"""The prefill role turn by turn: what it tells the sender, and what it does with the answers.

Everything is real but the model and the sender, which notes what it hears and holds the role to the
order that slabs are cut by: a chunk is reported in all layers before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine_model import EOS, expected
from local_system import fake_backend, local_config
from role_ports import ROUTER, NotingPort, prompt_spec

from kvferry.core.ids import AttemptKey, RequestId
from kvferry.engine.loop import StepLoop
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.ports import FromRouter, OpenGate, SessionClosed, SessionOpened
from kvferry.engine.wiring import build_parts
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    SendAborted,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import Span
from kvferry.kv_transfer.wire import layout_message, layout_of
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.prefill_worker.role import PrefillRole
from kvferry.proto import worker_pb2 as pb

NUM_LAYERS = 3
PROMPT = list(range(10, 47))  # 37 tokens: chunks of 16, 16 and 5


class NotingSender:
    """A sender that sends nothing."""

    def __init__(self) -> None:
        self.jobs: dict[AttemptKey, SendJob] = {}
        self.reports: dict[AttemptKey, list[tuple[int, int]]] = {}
        self.aborted: list[AttemptKey] = []

    def begin(self, job: SendJob) -> None:
        assert job.key not in self.jobs, "begun twice"
        self.jobs[job.key] = job
        self.reports[job.key] = []

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None:
        reports = self.reports[key]
        if reports and tokens_end > reports[-1][1]:
            tokens = reports[-1][1]
            assert (NUM_LAYERS, tokens) in reports, f"{tokens} tokens were left behind"
        reports.append((layers_end, tokens_end))

    def abort(self, key: AttemptKey) -> None:
        self.aborted.append(key)


class Rig:
    """One prefill worker, turned by hand on a clock set by hand."""

    def __init__(self, eos: tuple[int, ...] = (), **hooks: Callable[..., None]) -> None:
        self.now = 0.0
        self.spoil_next = False
        pool = local_config().prefill
        backend = fake_backend(pool.block_size, eos=eos, num_layers=NUM_LAYERS, **hooks)
        self._runner = backend.runner
        parts = build_parts(backend, pool, backend.identity.root("float64"), 30.0, self.clock)
        self.pool, self.sequences = parts.pool, parts.sequences
        self.sender = NotingSender()
        batch = PrefillBatch(parts.sequences, parts.stepper, OpenGate(), 16, 8)
        admission = PromptAdmission(
            num_blocks=64, block_size=4, max_model_len=128, max_batch_tokens=16
        )
        self.layout = layout_of(backend.kv)
        self.role = PrefillRole(parts.sequences, admission, batch, self.sender, self.layout)
        self.loop = StepLoop(self.role, self, self.clock)
        self.port = NotingPort()
        self.loop.post(SessionOpened(self.port))

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        result = self._runner.execute(plan, layer_done)
        if self.spoil_next and len(result.token_ids):
            result.invalid = (0,)
        return result

    def say(self, **kind: Any) -> None:
        self.loop.post(FromRouter(self.port, pb.RouterMessage(**kind)))

    def prefill(
        self, prompt: list[int] = PROMPT, request: int = 1, attempt: int = 1, cached: int = 0
    ) -> AttemptKey:
        """Ask for a prompt whose KV goes to a worker that holds ``cached`` tokens."""
        target = pb.Target(
            peer=7,
            endpoints=[pb.KvEndpoint(endpoint="loopback:none")],
            lease=request,
            cached_tokens=cached,
            layout=layout_message(self.layout),
            wire="float64",
            root_hash=b"theirs",
        )
        spec = prompt_spec(prompt)
        key = pb.Key(request=request, attempt=attempt)
        self.say(prefill=pb.Prefill(key=key, sequence=spec, target=target))
        return AttemptKey(ROUTER, RequestId(request), attempt)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def hear(self, event: SendDone | SendFailed | SendAborted) -> None:
        """A word of the sender, and the turn that takes it in."""
        self.loop.post(event)
        self.turn()

    def held(self) -> int:
        counts = self.pool.counts()
        return counts.in_use + counts.reserved

    def fenced(self) -> int:
        """Transfers that still pin blocks."""
        return self.pool.num_fences


def done(key: AttemptKey) -> SendDone:
    return SendDone(key, Account(transport="shm", nbytes=99, busy_s=0.5, resends=2))


def test_layers_are_reported_chunk_by_chunk() -> None:
    rig = Rig()
    key = rig.prefill(cached=8)
    rig.turn()
    job = rig.sender.jobs[key]
    assert (job.tokens, job.lease, job.peer) == (Span(8, 37), 1, 7)
    assert job.endpoints == ("loopback:none",)
    assert rig.sender.reports[key] == [(1, 16), (2, 16), (3, 16)]
    rig.turn(2)
    reports = [(n, end) for end in (32, 37) for n in (1, 2, 3)]
    # Once more when the step has ended.
    assert rig.sender.reports[key][3:] == [*reports, (3, 37)]
    assert rig.port.kinds() == ["prefill_done"]
    assert rig.port.sent[0].prefill_done.token_id == expected(PROMPT, 1)[0]
    assert rig.held() == 10
    rig.hear(done(key))
    assert rig.port.kinds() == ["prefill_done", "sent"]
    account = rig.port.sent[1].sent.account
    assert (account.transport, account.nbytes, account.busy_s, account.resends) == (
        "shm",
        99,
        0.5,
        2,
    )
    assert rig.held() == rig.fenced() == len(rig.sequences) == 0
    assert rig.sender.aborted == []
    assert rig.loop.load().endings == {"complete": 1}


def test_the_cached_prefix_is_reported_once_and_first() -> None:
    rig = Rig()
    first = rig.prefill(PROMPT[:20])
    rig.turn(2)
    rig.hear(done(first))
    key = rig.prefill(request=2, cached=4)
    rig.turn()
    assert rig.sender.reports[key] == [(3, 20), (1, 36), (2, 36), (3, 36)]
    rig.turn()
    assert rig.sender.reports[key][4:] == [(1, 37), (2, 37), (3, 37), (3, 37)]


def test_a_cached_prefix_that_the_peer_holds_too_is_not_reported() -> None:
    rig = Rig()
    rig.prefill(PROMPT[:20])
    rig.turn(2)
    key = rig.prefill(request=2, cached=20)
    rig.turn()
    assert rig.sender.reports[key] == [(1, 36), (2, 36), (3, 36)]


def test_nothing_is_sent_to_a_worker_that_holds_it_all() -> None:
    rig = Rig()
    rig.prefill(cached=len(PROMPT))
    rig.turn(3)
    assert rig.port.kinds() == ["prefill_done"]
    assert rig.sender.jobs == {}
    assert rig.held() == rig.fenced() == 0


STATES: dict[str, int] = {"waiting": 0, "first chunk": 1, "second chunk": 2, "transferring": 3}


def cancel(rig: Rig, key: AttemptKey) -> None:
    rig.say(cancel=pb.Cancel(key=pb.Key(request=key.request, attempt=key.attempt)))


def lose_session(rig: Rig, key: AttemptKey) -> None:
    rig.loop.post(SessionClosed(rig.port))


def pass_deadline(rig: Rig, key: AttemptKey) -> None:
    rig.now = 31.0


def supersede(rig: Rig, key: AttemptKey) -> None:
    rig.prefill([1], request=key.request, attempt=key.attempt + 1)


@pytest.mark.parametrize("end", [cancel, lose_session, pass_deadline, supersede])
@pytest.mark.parametrize("turns", STATES.values(), ids=STATES)
def test_whatever_ends_a_prompt_aborts_it_and_fences_its_blocks(
    turns: int, end: Callable[[Rig, AttemptKey], None]
) -> None:
    rig = Rig()
    key = rig.prefill()
    for _ in range(turns):
        rig.turn()
    end(rig, key)
    if turns == 0:
        # Both messages are taken in before anything is planned.
        rig.turn()
        assert rig.sender.aborted == []
        assert rig.fenced() == 0
        return
    rig.turn()
    assert rig.sender.aborted == [key]
    assert rig.sequences.get(key) is None
    assert rig.fenced() == 1
    rig.turn()
    assert rig.fenced() == 1
    rig.hear(SendAborted(key))
    assert rig.fenced() == 0
    assert "sent" not in rig.port.kinds()


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_transfer_that_fails_ends_its_prompt_and_no_other(turns: int) -> None:
    rig = Rig()
    key = rig.prefill(request=1)
    rig.turn(2)
    other = rig.prefill(PROMPT[:20], request=2)
    rig.turn(turns)
    rig.hear(SendFailed(key, Reason.ENDED, "too late"))
    assert rig.sequences.get(key) is None
    assert rig.fenced() == 0
    failed = next(message.failed for message in rig.port.sent if message.HasField("failed"))
    assert (failed.kind, failed.message, failed.key.request) == ("transfer", "ended: too late", 1)
    rig.turn(3)
    first = [m.prefill_done for m in rig.port.sent if m.HasField("prefill_done")]
    assert [d.token_id for d in first if d.key.request == 2] == expected(PROMPT[:20], 1)
    rig.hear(done(other))
    assert rig.held() == 0
    assert rig.loop.load().endings == {"failed: ended": 1, "complete": 1}


def test_an_end_that_crosses_the_sender_s_last_word() -> None:
    rig = Rig()
    key = rig.prefill()
    rig.turn(3)
    cancel(rig, key)
    rig.loop.post(done(key))
    rig.turn()
    assert rig.sender.aborted == [key]
    assert rig.held() == rig.fenced() == 0
    assert rig.port.kinds() == ["prefill_done"]


def test_a_peer_that_has_everything_already() -> None:
    """Its last word comes before the first token."""
    rig = Rig()
    key = rig.prefill()
    rig.turn()
    rig.hear(done(key))
    assert rig.port.kinds() == []
    rig.turn(2)
    assert rig.port.kinds() == ["prefill_done", "sent"]
    assert rig.sender.aborted == []
    assert rig.held() == rig.fenced() == 0


def test_a_first_token_that_ends_the_answer_aborts() -> None:
    rig = Rig(eos=tuple({EOS, expected(PROMPT, 1)[0]}))
    key = rig.prefill()
    rig.turn(3)
    assert rig.port.sent[0].prefill_done.finish_reason == "stop"
    assert rig.sender.aborted == [key]
    assert rig.fenced() == 1
    rig.hear(SendAborted(key))
    assert rig.fenced() == 0


def test_logits_that_are_not_finite_abort() -> None:
    rig = Rig()
    key = rig.prefill()
    rig.turn(2)
    rig.spoil_next = True
    rig.turn()
    assert rig.sender.aborted == [key]
    assert rig.port.kinds() == ["failed"]
    rig.hear(SendAborted(key))
    assert rig.held() == rig.fenced() == 0


@pytest.fixture(params=range(NUM_LAYERS))
def failing(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """The device falls over once, in one layer of the second step."""
    left = [request.param]

    def fail_once(plan: StepPlan, layer: int) -> None:
        if plan.step == 2 and layer in left:
            left.remove(layer)
            raise RuntimeError("the device fell over")

    yield Rig(before_layer=fail_once)
    assert not left


def test_a_step_that_fails_is_taken_up_with_the_same_chunks(failing: Rig) -> None:
    """The sender holds the role to its order: see ``NotingSender.computed``."""
    keys = [failing.prefill([1, *PROMPT[:20]], request=1)]
    failing.turn()
    keys.append(failing.prefill(request=2))
    # Five tokens of the first and eleven of the second make up the step that fails.
    failing.turn(9)
    assert failing.port.kinds() == ["prefill_done"] * 2
    for key, length in zip(keys, (21, 37), strict=True):
        assert failing.sender.reports[key][-1] == (NUM_LAYERS, length)
        failing.hear(done(key))
    assert failing.held() == 0
