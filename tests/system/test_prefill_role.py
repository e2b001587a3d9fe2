"""The prefill role turn by turn: what it tells the sender, and what it does with the answers.

Everything is real but the model and the sender, which notes what it hears and holds the role to the
order that slabs are cut by: a chunk is reported in all layers before the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fake_engine_model import EOS, expected
from prefill_rig import NUM_LAYERS, PROMPT, Rig
from role_ports import ROUTER

from kvferry.core.ids import AttemptKey, RequestId
from kvferry.core.span import Span
from kvferry.engine.plan import StepPlan
from kvferry.engine.ports import SessionClosed
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    SendAborted,
    SendDone,
    SendFailed,
)
from kvferry.proto import worker_pb2 as pb


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


def chunks_of(rig: Rig, turns: int = 1) -> list[dict[int, int]]:
    """Tokens per request in each of the next steps."""
    rig.chunks.clear()
    rig.turn(turns)
    return rig.chunks


def test_short_prompts_overtake_long_ones_up_to_a_bound() -> None:
    rig = Rig()
    rig.prefill([1] * 120, request=1)
    assert chunks_of(rig) == [{1: 16}]
    steps = []
    for number in range(2, 16):
        rig.prefill([number] * 16, request=number)
        steps += chunks_of(rig)
    overtakers = [step for step in steps if 1 not in step]
    # Eight full steps of younger prompts; then it is due.
    assert overtakers == [{number: 16} for number in range(2, 10)]
    assert steps[8:14] == [{1: 16}] * 6
    assert "busy" in rig.port.kinds(), "behind a prompt that is due there is no look-ahead"


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    rig = Rig(look_ahead=100)
    for number in (1, 2, 3):
        rig.prefill(request=number)
    # Blocks of 4: 36 tokens of each are shared, and the last one has to be computed.
    assert chunks_of(rig, 4) == [{1: 16}, {1: 16}, {1: 5}, {2: 1, 3: 1}]
    assert [m.prefill_done.cached_tokens for m in rig.port.sent] == [0, 36, 36]
    first = expected(PROMPT, 1)[0]
    assert [m.prefill_done.token_id for m in rig.port.sent] == [first] * 3


def test_who_shares_a_beginning_waits_for_that_and_no_longer() -> None:
    rig = Rig(look_ahead=100)
    rig.prefill([*PROMPT[:12], *[3] * 20], request=1)
    rig.prefill([*PROMPT[:12], *[4] * 21], request=2)
    assert chunks_of(rig, 3) == [{1: 16}, {1: 16}, {2: 16}]
    assert rig.sequences.get(AttemptKey(ROUTER, RequestId(2), 1)).cached_tokens == 12


def test_who_waits_for_a_prompt_that_is_cancelled_computes_for_itself() -> None:
    rig = Rig(look_ahead=100)
    key = rig.prefill(request=1)
    rig.prefill(request=2)
    assert chunks_of(rig) == [{1: 16}]
    cancel(rig, key)
    assert chunks_of(rig, 2) == [{2: 16}, {2: 5}]
    assert rig.sender.reports[AttemptKey(ROUTER, RequestId(2), 1)][0] == (NUM_LAYERS, 16)


def test_a_prompt_with_an_early_deadline_goes_first() -> None:
    rig = Rig()
    rig.prefill(PROMPT[:30], request=1)
    rig.prefill([7] * 36, request=2, deadline_s=1.0)
    assert chunks_of(rig, 2) == [{2: 16}, {2: 16}]
