"""Slabs that a sender holds ahead of its offers."""

from __future__ import annotations

import pytest
import receiver_bench
import sender_bench
from lease_table import NBYTES, key
from receiver_bench import OPTIONS

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import encode, encode_all
from kvferry.kv_transfer.jobs import Reason, SendDone
from kvferry.kv_transfer.messages import (
    PROBE_LEASE,
    Ack,
    Beat,
    Credit,
    Header,
    Message,
    Offer,
    Return,
    Sample,
    Spare,
)
from kvferry.kv_transfer.receiver_link import UNUSED_TIMEOUTS


def receiver(num_slabs: int = 6, spare_slabs: int = 2) -> receiver_bench.Bench:
    return receiver_bench.Bench(num_slabs=num_slabs, spare_slabs=spare_slabs)


def offer(slabs: int, lease: int = 1) -> Offer:
    return Offer(key=key(lease), lease=lease, slabs=slabs, nbytes=NBYTES)


def spares_of(said: list[Message]) -> list[Spare]:
    return [message for message in said if isinstance(message, Spare)]


def credit_of(spare: Spare) -> Credit:
    """For the bench, which looks at the slab and the grant alone."""
    return Credit(lease=1, slab=spare.slab, grant=spare.grant)


def test_none_is_given_before_an_offer() -> None:
    bench = receiver()
    assert bench.hear(Beat()) == bench.turn() == []


def test_the_first_offer_brings_its_credits_and_spare_ones_in_one_frame() -> None:
    bench = receiver()
    said = bench.hear(offer(1))
    assert [type(message) for message in said] == [Credit, Spare, Spare]
    assert len({message.slab for message in said if isinstance(message, Credit | Spare)}) == 3
    assert bench.channel.num_frames == 1


def test_one_serves_whichever_lease_it_is_filled_for_and_is_replaced_with_the_ack() -> None:
    bench = receiver()
    bench.leases.expect(attempt=2, lease=2)
    first, second = spares_of(bench.hear(offer(0)))
    bench.hear(offer(0, lease=2))
    ack, spare = bench.fill(credit_of(second), 0, lease=2, key=key(2))
    assert ack == Ack(lease=2, index=0, grant=second.grant)
    assert isinstance(spare, Spare)
    assert (spare.slab, spare.grant > second.grant) == (second.slab, True)
    ack, _ = bench.fill(credit_of(first), 0)
    assert ack == Ack(lease=1, index=0, grant=first.grant)


def test_one_that_is_being_filled_belongs_to_that_lease() -> None:
    bench = receiver()
    bench.leases.expect(attempt=2, lease=2)
    (first, _) = spares_of(bench.hear(offer(0)))
    bench.hear(offer(0, lease=2))
    bench.filling(credit_of(first), 0)
    said = bench.fill(credit_of(first), 0, lease=2, key=key(2))
    assert not [message for message in said if isinstance(message, Ack)]
    assert bench.leases.table.counters.dropped == {Reason.FOREIGN: 1}


def test_probes_do_not_use_them() -> None:
    bench = receiver()
    (first, _) = spares_of(bench.hear(offer(0)))
    assert not bench.hear(Sample(slab=first.slab, grant=first.grant, index=0, nbytes=8, digest=0))
    assert bench.leases.table.counters.dropped == {Reason.FOREIGN: 1}
    assert PROBE_LEASE == 0


@pytest.mark.parametrize(("num_slabs", "most"), [(1, 0), (2, 1), (3, 1), (64, 4)])
def test_half_of_the_slabs_at_most_are_spare(num_slabs: int, most: int) -> None:
    bench = receiver(num_slabs, spare_slabs=4)
    assert len(spares_of(bench.hear(offer(0)))) == most


def test_leases_that_wait_come_first() -> None:
    bench = receiver(num_slabs=4)
    said = bench.hear(offer(4))
    assert [type(message) for message in said] == [Credit] * 4


def test_a_link_is_idle_whose_slabs_are_only_spare() -> None:
    bench = receiver()
    (first, _) = spares_of(bench.hear(offer(0)))
    since_s = bench.link.idle_since_s
    assert since_s is not None
    bench.leases.offer()
    bench.leases.claim(1)
    bench.fill(credit_of(first), 0)
    assert bench.link.idle_since_s is None


def test_they_may_stay_unused_for_ever_but_not_once_they_are_being_filled() -> None:
    bench = receiver()
    (first, _) = spares_of(bench.hear(offer(0)))
    limit_s = UNUSED_TIMEOUTS * OPTIONS.progress_timeout_s
    for _ in range(int(3 * limit_s)):
        bench.clock.now += 1.0
        bench.hear(Beat())
    bench.filling(credit_of(first), 0)
    for _ in range(int(limit_s) - 1):
        bench.clock.now += 1.0
        bench.hear(Beat())
    bench.clock.now += 1.0
    with pytest.raises(LinkLost, match="use of a granted slab"):
        bench.hear(Beat())


def test_those_that_must_have_been_lost_are_named_again() -> None:
    """A sender that holds one has no slab without memory."""
    bench = receiver(num_slabs=2, spare_slabs=1)
    (lost,) = spares_of(bench.hear(offer(0)))
    assert spares_of(bench.hear(offer(1))) == []
    bench.clock.now += OPTIONS.progress_timeout_s - 0.5
    assert spares_of(bench.hear(offer(1))) == []
    bench.clock.now += 0.5
    bench.link.handle(encode(Beat()))
    assert spares_of(bench.hear(offer(0))) == []
    assert spares_of(bench.hear(offer(1))) == [lost]
    assert spares_of(bench.hear(offer(1))) == []


def test_one_that_comes_back_is_given_again() -> None:
    bench = receiver(num_slabs=2, spare_slabs=1)
    (first,) = spares_of(bench.hear(offer(0)))
    (again,) = bench.hear(Return(slab=first.slab, grant=first.grant))
    assert again == Spare(slab=first.slab, grant=first.grant + 1)


def test_a_sender_fills_what_it_holds_at_once_and_offers_the_rest() -> None:
    bench = sender_bench.Bench()
    assert bench.hear(Spare(slab=0, grant=1)) == bench.hear(Spare(slab=1, grant=2)) == []
    transfer = bench.begin()
    made, first, second = bench.computed(transfer)
    assert isinstance(made, Offer)
    assert isinstance(first, Header)
    assert isinstance(second, Header)
    assert (made.slabs, len(transfer.slabs)) == (2, 4)
    held = [(message.header.index, message.grant) for message in (first, second)]
    assert held == [(0, 2), (1, 1)], "the newest first"
    for header in (first, second):
        bench.ack(header)
    for grant in (3, 4):
        bench.ack(*bench.credit(grant))
    assert isinstance(bench.events[0], SendDone)


def test_a_slab_that_waits_for_its_credit_takes_one_that_comes_first() -> None:
    bench = sender_bench.Bench()
    transfer = bench.send()
    (header,) = bench.hear(Spare(slab=0, grant=1))
    assert isinstance(header, Header)
    assert (header.header.index, list(transfer.unsent)) == (0, [1, 2, 3])


def test_one_counts_once() -> None:
    bench = sender_bench.Bench()
    bench.hear(Spare(slab=0, grant=1))
    bench.hear(Spare(slab=0, grant=1))
    (made, *headers) = bench.computed(bench.begin())
    assert (made.slabs, len(headers)) == (3, 1)


def test_one_that_is_not_there_ends_the_link() -> None:
    bench = sender_bench.Bench()
    with pytest.raises(ProtocolError, match="slab"):
        bench.hear(Spare(slab=sender_bench.NUM_SLABS, grant=1))


def test_those_of_a_link_go_with_it() -> None:
    bench = sender_bench.Bench()
    bench.hear(Spare(slab=0, grant=1))
    bench.session.close()
    bench.open()
    (made,) = bench.computed(bench.begin())
    assert made.slabs == 4


def test_several_messages_of_a_frame_are_handled_in_their_order() -> None:
    bench = sender_bench.Bench()
    bench.send()
    frame = encode_all([Credit(lease=1, slab=0, grant=1), Credit(lease=1, slab=1, grant=2)])
    bench.session.handle(frame)
    said = bench.turn()
    assert [(m.header.index, m.grant) for m in said if isinstance(m, Header)] == [(0, 1), (1, 2)]
