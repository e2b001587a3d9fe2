"""What finished transfers teach the push policy, on a virtual clock."""

from __future__ import annotations

import pytest
from lease_table import NBYTES, TOKENS, key
from sender_bench import Bench

from kvferry.kv_transfer.lessons import MAX_SENT, Lessons
from kvferry.kv_transfer.outgoing import Transfer
from kvferry.kv_transfer.push import Push, PushPolicy

LENGTH = TOKENS.length


def sent(bench: Bench, attempt: int = 1, layer_s: float = 2.0) -> Transfer:
    """A prompt of two layers, each computed in so long, sent when both are; a pack takes 1 s."""
    transfer = bench.begin(attempt, attempt)
    bench.computed(transfer, 0, TOKENS.end)
    for layers_end in (1, 2):
        bench.clock.now += layer_s
        bench.computed(transfer, layers_end, TOKENS.end)
        if attempt % 2 == 0:
            for grant in (1, 2):
                bench.ack(*bench.credit(10 * attempt + 2 * layers_end + grant, attempt), attempt)
    if attempt % 2:
        for grant in range(4):
            bench.ack(*bench.credit(10 * attempt + grant, attempt), attempt)
    assert bench.succeeded[-1] is transfer
    return transfer


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def policy() -> PushPolicy:
    return PushPolicy(Push.AUTO)


def test_a_prompt_sent_at_once_teaches_all_rates(bench: Bench, policy: PushPolicy) -> None:
    lessons = Lessons(policy)
    assert policy.estimate(LENGTH) is None
    lessons.sent(sent(bench))
    estimate = policy.estimate(LENGTH)
    assert estimate is not None
    assert estimate.layer_token_s == pytest.approx(4.0 / (2 * LENGTH))
    assert estimate.pack_byte_s == pytest.approx(4.0 / NBYTES)
    assert estimate.send_s + estimate.byte_s * NBYTES == pytest.approx(4.0)
    assert estimate.slowdown == 0.5
    assert estimate.rest_s == 0.0


def test_packing_beside_the_computation_teaches_what_it_costs(
    bench: Bench, policy: PushPolicy
) -> None:
    """Two packs of a second each in the first layer's wake: here they stop the computation."""
    lessons = Lessons(policy)
    for _ in range(30):
        bench.open()  # grants begin anew
        lessons.sent(sent(bench))
        bench.transfers.clear()
        lessons.sent(sent(bench, attempt=2))
    estimate = policy.estimate(LENGTH)
    assert estimate is not None
    assert estimate.layer_token_s == pytest.approx(4.0 / (2 * LENGTH))
    assert estimate.slowdown == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("early", [True, False], ids=["before it has arrived", "after"])
def test_the_first_token_teaches_what_goes_unnoticed(
    bench: Bench, policy: PushPolicy, early: bool
) -> None:
    lessons = Lessons(policy)
    if early:
        transfer = bench.begin()
        bench.computed(transfer)
        lessons.first_token(key(), [transfer], bench.clock.now + 1.5)
        lessons.first_token(key(), [transfer], bench.clock.now + 9.0)
        for grant in range(1, 5):
            bench.ack(*bench.credit(grant))
        lessons.sent(transfer)
        policy.learn_compute(LENGTH, 1.0, 1.0, 0.0)
    else:
        transfer = sent(bench)
        lessons.sent(transfer)
        lessons.first_token(key(), [], bench.clock.now - 4.0 + 1.5)
        lessons.first_token(key(), [], bench.clock.now + 9.0)
    estimate = policy.estimate(LENGTH)
    assert estimate is not None
    assert estimate.rest_s == pytest.approx(1.5)


def test_what_was_damaged_or_owes_nothing_teaches_nothing(bench: Bench, policy: PushPolicy) -> None:
    lessons = Lessons(policy)
    transfer = sent(bench)
    transfer.account.resends = 1
    lessons.sent(transfer)
    empty = bench.begin(attempt=3, owed=transfer.owed._replace(parts=()))
    lessons.sent(empty)
    assert policy.estimate(LENGTH) is None


def test_only_so_many_prompts_wait_for_their_first_token(bench: Bench, policy: PushPolicy) -> None:
    lessons = Lessons(policy)
    for attempt in range(1, 2 * MAX_SENT + 3, 2):
        lessons.sent(sent(bench, attempt))
    lessons.first_token(key(1), [], bench.clock.now)
    estimate = policy.estimate(LENGTH)
    assert estimate is not None
    assert estimate.rest_s == 0.0
