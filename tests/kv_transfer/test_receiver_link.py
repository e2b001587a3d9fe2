"""A receiver's link on a virtual clock: pulls, late bytes, waiting slabs, gaps and timers."""

from __future__ import annotations

import pytest
from lease_table import MOVES, NBYTES, ONE, Leases, key
from receiver_bench import Bench

from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.grants import PULLS
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, ReceiveFailed
from kvferry.kv_transfer.messages import (
    PROBE_LEASE,
    Abort,
    Ack,
    Beat,
    Complete,
    Credit,
    Measure,
    Missing,
    Offer,
    Pull,
    Resend,
    Return,
    Sample,
)


def test_a_lease_goes_through() -> None:
    bench = Bench()
    credits = bench.offer(len(MOVES))
    assert len(credits) == len(MOVES)
    for credit, move in zip(credits, MOVES, strict=True):
        said = bench.fill(credit, move.index)
        assert said == [Ack(lease=1, index=move.index, grant=credit.grant)]
    (event,) = bench.leases.events
    assert isinstance(event, ReceiveDone)
    assert event.account.transport == "fake"
    assert bench.turn() == []
    assert bench.memory.scattered == [move.index for move in MOVES]
    assert bench.channel.wakes == 0


def test_bytes_that_are_late_are_waited_for_while_others_land() -> None:
    bench = Bench(arrives=False)
    first, second = bench.offer(2)
    assert bench.fill(first, 0) == []
    assert bench.fill(second, 1) == []
    bench.inlet.here.add((second.slab, second.grant))
    assert bench.turn() == [Ack(lease=1, index=1, grant=second.grant)]
    assert bench.turn() == []
    bench.inlet.here.add((first.slab, first.grant))
    assert bench.turn() == [Ack(lease=1, index=0, grant=first.grant)]


def test_pulls_and_receives_are_posted_in_one_order_and_are_few() -> None:
    bench = Bench(is_pulled=True, arrives=False)
    credits = bench.offer(len(MOVES))
    assert len(credits) == len(MOVES) == 4
    more = PULLS + 1
    bench = Bench(is_pulled=True, arrives=False, num_slabs=more)
    slabs = [bench.hear(Measure(slabs=more - 1)), bench.offer(1)]
    credits = [credit for part in slabs for credit in part if isinstance(credit, Credit)]
    assert len(credits) == more
    said = []
    for i, credit in enumerate(credits[:-1]):
        sample = Sample(slab=credit.slab, grant=credit.grant, index=i, nbytes=8, digest=0)
        said += bench.hear(sample)
    said += bench.fill(credits[-1], 0)
    posted = [(slab, grant) for slab, grant, _ in bench.inlet.pulls]
    assert posted == [(credit.slab, credit.grant) for credit in credits[:PULLS]]
    assert said == [Pull(slab=slab, grant=grant) for slab, grant in posted]
    bench.inlet.here.add(posted[1])
    last = credits[-1]
    assert bench.turn() == [
        Ack(lease=PROBE_LEASE, index=1, grant=posted[1][1]),
        Pull(slab=last.slab, grant=last.grant),
    ]
    assert bench.inlet.pulls[-1] == (last.slab, last.grant, MOVES[0].nbytes)


def test_a_slab_that_was_pulled_is_free_only_once_its_bytes_came() -> None:
    """Whatever became of the lease: the sender honours every Pull."""
    bench = Bench(is_pulled=True, arrives=False, num_slabs=1)
    (credit,) = bench.offer(2)
    assert bench.fill(credit, 0) == [Pull(slab=credit.slab, grant=credit.grant)]
    bench.hear(Abort(key=key(), lease=1, reason=Reason.ABORTED))
    bench.hear(Return(slab=credit.slab, grant=credit.grant))
    bench.leases.expect(attempt=2, lease=2)
    second = Offer(key=key(2), lease=2, slabs=1, nbytes=NBYTES)
    assert bench.hear(second) == []
    bench.inlet.here.add((credit.slab, credit.grant))
    said = bench.turn()
    assert said == [
        Abort(key=key(), lease=1, reason=Reason.ENDED),
        Credit(lease=2, slab=credit.slab, grant=credit.grant + 1),
    ]
    assert bench.memory.scattered == []


def test_a_slab_whose_lease_ended_before_its_pull_is_free_at_once() -> None:
    bench = Bench(is_pulled=True, arrives=False, num_slabs=1)
    (credit,) = bench.offer(1)
    bench.leases.table.release(ONE)
    assert Abort(key=key(), lease=1, reason=Reason.ENDED) in bench.fill(credit, 0)
    assert bench.inlet.pulls == []
    bench.leases.expect(attempt=2, lease=2)
    (again,) = bench.hear(Offer(key=key(2), lease=2, slabs=1, nbytes=NBYTES))
    assert again == Credit(lease=2, slab=credit.slab, grant=credit.grant + 1)


def test_a_slab_waits_while_another_link_scatters_to_its_lease() -> None:
    bench = Bench()
    (credit,) = bench.offer(1)
    bench.leases.offer()
    bench.leases.claim(1)
    assert bench.fill(credit, 0) == []
    assert bench.leases.table.counters.tallies == {Tally.WAIT: 1}
    wakes = bench.channel.wakes
    bench.leases.settle(1)
    assert bench.channel.wakes == wakes + 1
    assert bench.turn() == [Ack(lease=1, index=0, grant=credit.grant)]


def test_a_slab_does_not_wait_for_ever_for_a_scatter() -> None:
    bench = Bench()
    (credit,) = bench.offer(1)
    bench.leases.offer()
    bench.leases.claim(1)
    assert bench.fill(credit, 0) == []
    bench.clock.now += 4.9
    bench.hear(Beat())
    assert bench.link.turn() == pytest.approx(0.1)
    bench.clock.now += 0.1
    (said,) = bench.hear(Beat())
    assert isinstance(said, Abort)
    assert said.reason is Reason.TIMEOUT
    assert not bench.leases.events
    bench.leases.settle(1)
    (event,) = bench.leases.events
    assert isinstance(event, ReceiveFailed)
    assert event.reason is Reason.TIMEOUT


def test_damage_spends_the_grant_and_brings_another_unasked() -> None:
    bench = Bench(num_slabs=1)
    (credit,) = bench.offer(1)
    bench.memory.found = [1]
    resend, again = bench.fill(credit, 0)
    assert resend == Resend(lease=1, index=0, grant=credit.grant)
    assert again == Credit(lease=1, slab=credit.slab, grant=credit.grant + 1)
    bench.memory.found = [0]
    assert bench.fill(again, 0) == [Ack(lease=1, index=0, grant=again.grant)]


def test_an_offer_made_before_the_damage_was_known_does_not_unmake_the_credit() -> None:
    bench = Bench(num_slabs=1)
    (credit,) = bench.offer(1)
    bench.memory.found = [1]
    bench.link.handle(encode(Offer(key=key(), lease=1, slabs=0, nbytes=NBYTES)))
    _, again = bench.fill(credit, 0)
    assert isinstance(again, Credit)
    assert bench.offer(0) == []
    bench.memory.found = [0]
    assert bench.fill(again, 0) == [Ack(lease=1, index=0, grant=again.grant)]


def test_lost_headers_are_asked_for_at_once_and_once() -> None:
    bench = Bench()
    credits = bench.offer(4)
    missing, ack = bench.fill(credits[2], 2)
    assert missing == Missing(lease=1, begin=0, end=2)
    assert ack == Ack(lease=1, index=2, grant=credits[2].grant)
    assert len(bench.fill(credits[3], 3)) == 1
    for index in (0, 1):
        assert bench.fill(credits[index], index) == [
            Ack(lease=1, index=index, grant=credits[index].grant)
        ]
    assert isinstance(bench.leases.events[0], ReceiveDone)
    assert bench.leases.table.counters.tallies == {Tally.GAP: 1}


def test_a_header_said_twice_is_taken_once() -> None:
    bench = Bench(is_pulled=True, arrives=False)
    (credit,) = bench.offer(1)
    assert len(bench.fill(credit, 0)) == 1
    assert bench.fill(credit, 0) == []
    assert len(bench.inlet.pulls) == 1
    assert bench.leases.table.counters.dropped == {Reason.DUPLICATE: 1}
    bench.inlet.here.add((credit.slab, credit.grant))
    assert bench.turn() == [Ack(lease=1, index=0, grant=credit.grant)]
    # Its acknowledgement was lost: it is given again, and the slab not looked at.
    assert bench.fill(credit, 0) == [Ack(lease=1, index=0, grant=credit.grant)]
    assert bench.memory.scattered == [0]


def test_the_sender_hears_at_once_of_an_end_that_it_did_not_cause() -> None:
    leases = Leases()
    leases.expect()
    ranks = [Bench(leases, rank=rank) for rank in (0, 1)]
    for bench in ranks:
        bench.offer(1, nbytes=NBYTES // 2, ranks=2)
    leases.clock.now = 110.0
    for bench in ranks:
        bench.link.handle(encode(Beat()))
    leases.table.expire()
    for bench in ranks:
        assert bench.channel.wakes == 1
        assert bench.turn() == [Abort(key=key(), lease=1, reason=Reason.ENDED)]
        assert bench.turn() == []
    assert leases.table.counters.dropped == {}


def test_a_lease_whose_last_slab_was_acknowledged_is_not_spoken_of_again() -> None:
    bench = Bench()
    bench.leases.expect(attempt=2, lease=2)
    for credit, move in zip(bench.offer(len(MOVES)), MOVES, strict=True):
        bench.fill(credit, move.index)
    bench.hear(Offer(key=key(2), lease=2, slabs=1, nbytes=NBYTES))
    bench.leases.table.release(LeaseId(2))
    assert bench.turn() == [Abort(key=key(2), lease=2, reason=Reason.ENDED)]


def test_the_other_ranks_hear_of_an_abort_and_the_one_that_sent_it_does_not() -> None:
    leases = Leases()
    leases.expect()
    ranks = [Bench(leases, rank=rank, num_slabs=1) for rank in (0, 1)]
    for bench in ranks:
        bench.offer(2, nbytes=NBYTES // 2, ranks=2)
    assert ranks[0].hear(Abort(key=key(), lease=1, reason=Reason.STALE)) == []
    assert ranks[1].turn() == [Abort(key=key(), lease=1, reason=Reason.ENDED)]
    (event,) = leases.events
    assert isinstance(event, ReceiveFailed)
    assert (event.reason, event.detail) == (Reason.ABORTED, Reason.STALE)


def test_slabs_go_to_the_leases_in_turn() -> None:
    bench = Bench(num_slabs=4)
    bench.leases.expect(attempt=2, lease=2)
    bench.link.handle(encode(Offer(key=key(), lease=1, slabs=9, nbytes=NBYTES)))
    said = bench.hear(Offer(key=key(2), lease=2, slabs=9, nbytes=NBYTES))
    assert [credit.lease for credit in said if isinstance(credit, Credit)] == [1, 2, 1, 2]


def test_a_lost_acknowledgement_of_the_last_slab_is_answered_by_complete() -> None:
    bench = Bench()
    for credit, move in zip(bench.offer(len(MOVES)), MOVES, strict=True):
        bench.fill(credit, move.index)
    said = bench.hear(Offer(key=key(), lease=1, slabs=1, nbytes=NBYTES))
    assert said == [Complete(key=key(), lease=1)]
