"""The decode role turn by turn: what it tells the receiver, and what it does with the answers.

Everything is real but the model and the receiver, which notes what it hears.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from local_system import fake_backend, local_config
from role_ports import ROUTER, NotingPort, prompt_spec

from kvferry.core.ids import AttemptKey, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.decode_worker.admission import Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.loop import StepLoop
from kvferry.engine.ports import FromRouter, OpenGate, SessionClosed, SessionOpened
from kvferry.engine.wiring import build_parts
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    ReceiveClosed,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveJob,
)
from kvferry.proto import worker_pb2 as pb

PROMPT = list(range(10, 31))
LEASE_S = 30.0
KEY = AttemptKey(ROUTER, RequestId(1), 1)


class NotingReceiver:
    """A receiver that receives nothing."""

    def __init__(self) -> None:
        self.jobs: list[ReceiveJob] = []
        self.renewed: list[tuple[LeaseId, float]] = []
        self.released: list[LeaseId] = []
        self.counters = Counter({str(Reason.DAMAGED): 2})
        self.tallies = Counter({str(Tally.RESEND): 3})
        self.is_slow = False
        self.unready: list[Callable[[], None]] = []

    def expect(self, job: ReceiveJob, ready: Callable[[], None]) -> None:
        self.jobs.append(job)
        if self.is_slow:
            self.unready.append(ready)
        else:
            ready()

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        self.renewed.append((lease, deadline_s))

    def release(self, lease: LeaseId) -> None:
        self.released.append(lease)


class Rig:
    """One decode worker, turned by hand on a clock set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        pool = local_config().decode
        backend = fake_backend(pool.block_size)
        parts = build_parts(backend, pool, backend.identity.root("it"), LEASE_S, self.clock)
        self.pool, self.sequences = parts.pool, parts.sequences
        self.receiver = NotingReceiver()
        gate = OpenGate()
        batch = DecodeBatch(parts.sequences, parts.stepper, gate, 16, 8)
        ledger = Ledger(num_blocks=64, block_size=4, max_model_len=128, growth_tokens=32)
        self.role = DecodeRole(
            parts.sequences, ledger, batch, self.receiver, gate, reserve_queue=4, wire="bfloat16"
        )
        self.loop = StepLoop(self.role, backend.runner, self.clock)
        self.port = NotingPort()
        self.loop.post(SessionOpened(self.port))

    def clock(self) -> float:
        return self.now

    def say(self, **kind: object) -> None:
        self.loop.post(FromRouter(self.port, pb.RouterMessage(**kind)))
        self.loop.turn()

    def reserve(self, deadline_s: float = 60.0) -> ReceiveJob:
        key = pb.Key(request=KEY.request, attempt=KEY.attempt)
        self.say(reserve=pb.Reserve(key=key, sequence=prompt_spec(PROMPT, deadline_s)))
        return self.receiver.jobs[-1]

    def renew(self) -> None:
        key = pb.Key(request=KEY.request, attempt=KEY.attempt)
        self.say(renew=pb.Renew(keys=[key, pb.Key(request=9, attempt=1)]))

    def hear(self, event: ReceiveEvent) -> None:
        self.loop.post(event)
        self.loop.turn()


def test_a_lease_says_what_may_come_and_until_when() -> None:
    rig = Rig()
    job = rig.reserve()
    assert (job.key, job.wire, job.tokens) == (KEY, "bfloat16", Span(0, len(PROMPT)))
    assert job.deadline_s == rig.now + LEASE_S
    assert rig.port.sent[-1].granted.lease == job.lease


def test_a_lease_is_granted_only_when_every_rank_would_take_its_slabs() -> None:
    rig = Rig()
    rig.receiver.is_slow = True
    job = rig.reserve()
    assert rig.port.kinds() == []
    rig.receiver.unready[0]()
    assert rig.port.sent[-1].granted.lease == job.lease


def test_no_lease_outlives_its_request() -> None:
    assert Rig().reserve(deadline_s=5.0).deadline_s == 105.0


def test_renewals_reach_the_receiver_while_kv_is_awaited() -> None:
    rig = Rig()
    job = rig.reserve(deadline_s=50.0)
    rig.now += 10.0
    rig.renew()
    assert rig.receiver.renewed == [(job.lease, 100.0 + 10.0 + LEASE_S)]
    rig.now += 15.0
    rig.renew()  # never past the request's own deadline
    assert rig.receiver.renewed[1:] == [(job.lease, 150.0)]
    rig.hear(ReceiveDone(job.key, job.lease, Account(transport="shm", nbytes=7)))
    rig.renew()
    assert len(rig.receiver.renewed) == 2


def test_what_was_received_is_told_once_both_are_here() -> None:
    rig = Rig()
    job = rig.reserve()
    rig.hear(ReceiveDone(job.key, job.lease, Account("tcp", nbytes=7, busy_s=0.5, wall_s=2.0)))
    assert rig.port.kinds() == ["granted"]
    assert rig.loop.load().dropped == {"damaged": 2}
    assert rig.loop.load().link_events == {"resend": 3}
    assert rig.loop.load().endings == {"complete": 1}
    assert rig.pool.counts().in_use == 6


@pytest.mark.parametrize("how", ["cancel", "session", "lease"])
def test_whatever_ends_a_reservation_fences_its_blocks_until_the_last_word(how: str) -> None:
    rig = Rig()
    job = rig.reserve()
    if how == "cancel":
        rig.say(cancel=pb.Cancel(key=pb.Key(request=KEY.request, attempt=KEY.attempt)))
    elif how == "session":
        rig.loop.post(SessionClosed(rig.port))
    else:
        rig.now += LEASE_S + 1.0
    rig.loop.turn()
    assert rig.receiver.released == [job.lease]
    assert len(rig.sequences) == 0
    assert rig.pool.counts().fenced == 6
    rig.hear(ReceiveClosed(job.key, job.lease))
    assert rig.pool.counts().fenced == 0
    assert rig.loop.load().endings == {"released": 1}


def test_a_lease_that_fails_ends_the_attempt_with_the_reason() -> None:
    rig = Rig()
    job = rig.reserve()
    rig.hear(ReceiveFailed(job.key, job.lease, Reason.TIMEOUT, "a slab was lost"))
    failed = rig.port.sent[-1].failed
    assert (failed.kind, failed.message) == ("transfer", "timeout: a slab was lost")
    assert rig.pool.counts().free == 64
    assert rig.receiver.released == []
