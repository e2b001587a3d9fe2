"""Whole transfers over links at fault, on real threads; the simulator has the many schedules."""

from __future__ import annotations

import random

import pytest

from kvferry.core.ids import LeaseId
from kvferry.core.span import Span
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.jobs import (
    ReceiveDone,
    SendAborted,
    SendDone,
    SendFailed,
)
from kvferry.kv_transfer.transports.faults import (
    Chances,
    Fault,
    Faults,
    Place,
    Script,
    Step,
)
from kvferry.kv_transfer.transports.faulty import FaultyConnect


def test_a_whole_transfer_bears_a_named_fault_of_each_kind(make_loopback_pair) -> None:
    """Damage, loss and repetition on both sides: delivered, and equal."""
    script = Script(
        [
            Step(Fault.FLIP_SLAB, Place.PUSH, nth=1),
            Step(Fault.TORN_SLAB, Place.PUSH, nth=3),
            Step(Fault.DUPLICATE, message="header", nth=2),
            Step(Fault.REPLAY, message="header", nth=4),
            Step(Fault.REORDER, message="header", nth=5),
            Step(Fault.DROP, message="offer"),
        ]
    )
    faults = Faults(script)
    pair = make_loopback_pair(
        connect=FaultyConnect(connect, faults), progress_timeout_s=0.5, slab_bytes=2048
    )
    pair.expect()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()
    assert {Fault.FLIP_SLAB, Fault.TORN_SLAB, Fault.DUPLICATE, Fault.DROP} <= set(faults.counters)


@pytest.mark.parametrize("transport", ["loopback", "shm", "tcp"])
@pytest.mark.parametrize("seed", [1, 2])
def test_transfers_under_random_faults_are_whole_or_fail(
    pairs_over, transport: str, seed: int
) -> None:
    """Over real links and threads; the simulator has the many schedules."""
    chances = {
        Fault.DELAY: 0.02,
        Fault.DROP: 0.01,
        Fault.DUPLICATE: 0.02,
        Fault.FLIP: 0.005,
        Fault.REPLAY: 0.02,
        Fault.DIE: 0.01,
        Fault.FLIP_SLAB: 0.05,
        Fault.STALE_SLAB: 0.03,
        Fault.LATE_SLAB: 0.1,
    }
    faults = Faults(Chances(chances), seed=seed, delay_s=0.02)
    pair = pairs_over(transport)(
        connect=FaultyConnect(connect, faults),
        progress_timeout_s=0.3,
        silence_s=1.0,
        slab_bytes=2048,
    )
    done = 0
    for attempt in range(1, 9):
        pair.target.slots.zero_()
        pair.expect(attempt=attempt, lease=attempt)
        pair.send(attempt=attempt, lease=attempt)
        sent = pair.sent.next()
        if isinstance(sent, SendFailed):
            pair.receiver.release(LeaseId(attempt))
        received = pair.received.next()
        if isinstance(received, ReceiveDone):
            pair.assert_equal()
            done += 1
        assert isinstance(received, ReceiveDone) or not isinstance(sent, SendDone)
    faults.heal()
    pair.expect(attempt=99, lease=99)
    pair.send(attempt=99, lease=99)
    assert isinstance(pair.received.next(), ReceiveDone)
    pair.assert_equal()
    assert done
    assert faults.counters


CHANCES = Chances(
    {
        Fault.DROP: 0.03,
        Fault.DUPLICATE: 0.03,
        Fault.REORDER: 0.03,
        Fault.DIE: 0.01,
        Fault.FLIP_SLAB: 0.03,
        Fault.STALE_SLAB: 0.02,
        Fault.LATE_SLAB: 0.02,
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(4))
def test_whatever_happens_done_means_equal_and_every_job_ends_once(
    make_loopback_pair, seeded: int, round_number: int
) -> None:
    """On real threads; the simulator has many more schedules."""
    rng = random.Random(seeded + round_number)
    faults = Faults(CHANCES, seed=seeded + round_number)
    pair = make_loopback_pair(
        tokens=Span(3, 90),
        connect=FaultyConnect(connect, faults),
        progress_timeout_s=0.1,
        beat_s=0.05,
        silence_s=0.5,
    )
    for number in range(1, 13):
        pair.target.slots.zero_()
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        if rng.random() < 0.2:
            pair.sender.abort(pair.key(request=number))
        sent = pair.sent.next()
        assert sent.key == pair.key(request=number)
        pair.receiver.release(number)
        received = pair.received.next()
        assert received.key == pair.key(request=number)
        if isinstance(received, ReceiveDone):
            pair.assert_equal()
        if isinstance(sent, SendDone):
            assert isinstance(received, ReceiveDone)
        assert isinstance(sent, SendDone | SendFailed | SendAborted)
    pair.sent.assert_none()
    pair.received.assert_none()
