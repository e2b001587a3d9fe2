"""A receiver's side of probes: granted what transfers leave, verified, one link at a time."""

from __future__ import annotations

import xxhash
from lease_table import Leases
from receiver_bench import Bench

from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.messages import PROBE_LEASE, Ack, Beat, Credit, Measure, Resend, Sample
from kvferry.kv_transfer.receiver_probes import TURN_S, ProbeTurn


def sample(bench: Bench, credit: Credit, index: int, digest: int) -> Sample:
    bench.inlet.slab(credit.slab)[:4] = b"abcd"
    return Sample(slab=credit.slab, grant=credit.grant, index=index, nbytes=4, digest=digest)


def test_a_probe_is_granted_slabs_verified_and_acknowledged() -> None:
    bench = Bench(num_slabs=3)
    good = xxhash.xxh3_64_intdigest(b"abcd")
    credits = bench.hear(Measure(slabs=4))
    assert [credit.lease for credit in credits] == [PROBE_LEASE] * 2
    answers = []
    for index, digest in enumerate((good, 0, good ^ 1, good)):
        answer, *more = bench.hear(sample(bench, credits[index], index, digest))
        answers.append(type(answer))
        assert (answer.lease, answer.index) == (PROBE_LEASE, index)
        credits += more
    assert answers == [Ack, Ack, Resend, Ack]
    tallies = bench.leases.table.counters.tallies
    assert tallies == {Tally.PROBE: 4, Tally.PROBE_DAMAGED: 1}
    assert bench.hear(sample(bench, credits[0], 0, 0)) == []
    assert bench.leases.table.counters.dropped == {Reason.FOREIGN: 1}


def test_transfers_go_before_probes() -> None:
    bench = Bench(num_slabs=3)
    probe = bench.hear(Measure(slabs=4096))
    assert len(probe) == 2
    # One slab was kept free; what the probe gives back goes to the transfer first.
    assert len(bench.offer(3)) == 1
    (ack, credit) = bench.hear(sample(bench, probe[0], 0, 0))
    assert isinstance(ack, Ack)
    assert credit.lease == 1


def test_a_slab_of_a_probe_is_not_taken_for_a_lease_nor_the_other_way_round() -> None:
    bench = Bench()
    (probe,) = bench.hear(Measure(slabs=1))
    (credit,) = bench.offer(1)
    assert bench.fill(probe, 0) == []
    assert bench.hear(sample(bench, credit, 0, 0)) == []
    assert bench.leases.table.counters.dropped == {Reason.FOREIGN: 2}
    assert bench.memory.scattered == []


def test_one_link_probes_at_a_time_and_not_for_long() -> None:
    leases = Leases()
    probes = ProbeTurn(leases.clock)
    one, two = (Bench(leases, probes=probes, num_slabs=2, rank=rank) for rank in (0, 1))
    (first,) = one.hear(Measure(slabs=2))
    assert two.hear(Measure(slabs=1)) == []
    (_, second) = one.hear(sample(one, first, 0, 0))
    assert one.hear(sample(one, second, 1, 0))[0] == Ack(
        lease=PROBE_LEASE, index=1, grant=second.grant
    )
    assert two.channel.wakes == 1
    (third,) = two.turn()
    assert isinstance(third, Credit)
    assert one.hear(Measure(slabs=1)) == []
    leases.clock.now += TURN_S
    for bench in (one, two):
        bench.link.handle(encode(Beat()))
    (fourth,) = one.turn()
    assert isinstance(fourth, Credit)
    two.link.close()
    one.link.close()
    assert probes.take(two, two.channel.wake)
