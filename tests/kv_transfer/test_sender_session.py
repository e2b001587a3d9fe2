"""A sender's session on a virtual clock: offers, slabs in flight, pulls, what is counted."""

from __future__ import annotations

from math import inf

from lease_table import NBYTES, TOKENS, key
from sender_bench import NUM_SLABS, OWED, Bench

from kvferry.kv_transfer.jobs import Reason, SendDone
from kvferry.kv_transfer.messages import (
    Abort,
    Beat,
    Header,
    Offer,
    Pull,
    Return,
)
from kvferry.kv_transfer.sender_session import POLL_S
from kvferry.kv_transfer.states import State


def headers(said: list) -> list[int]:
    """The slabs announced; nothing else is said."""
    assert all(isinstance(message, Header) for message in said), said
    return [message.header.index for message in said]


def test_a_transfer_goes_through() -> None:
    bench = Bench()
    transfer = bench.send()
    for grant in range(4):
        (header,) = bench.credit(grant + 1)
        assert header.slab == (grant + 1) % NUM_SLABS
        body = header.header
        assert (body.key, body.lease, body.index, body.wire) == (key(), 1, grant, "float32")
        assert body.move == transfer.slabs[grant].move
        assert (body.chain_hash, body.digests) == (b"h", [grant])
        assert bench.ack(header) == []
    (event,) = bench.events
    assert isinstance(event, SendDone)
    account = event.account
    assert (account.transport, account.nbytes, account.resends) == ("fake", NBYTES, 0)
    assert account.busy_s == account.wall_s == account.exposed_s == 4.0
    assert bench.transfers == {}
    assert bench.succeeded == [transfer]
    assert bench.outlet.pushed == [
        (grant % NUM_SLABS, grant, ready.move.nbytes)
        for grant, ready in enumerate(transfer.slabs, 1)
    ]


def test_an_offer_names_all_that_stands_ready_without_memory() -> None:
    """And the whole part, and how many ranks have one."""
    bench = Bench()
    transfer = bench.begin()
    assert bench.turn() == []
    assert transfer.state is State.WAITING
    (offer,) = bench.computed(transfer, 1, TOKENS.end)
    assert offer == Offer(key=key(), lease=1, slabs=2, nbytes=NBYTES, ranks=2)
    assert transfer.state is State.OFFERED
    bench.credit(1)
    (offer,) = bench.computed(transfer)
    assert (offer.slabs, offer.nbytes) == (3, NBYTES)
    assert bench.turn() == []


def test_what_is_computed_is_packed_after_its_event() -> None:
    bench = Bench()
    transfer = bench.begin()
    bench.computed(transfer, 1, TOKENS.end)
    bench.credit(1)
    bench.computed(transfer, 2, TOKENS.end)
    for grant in range(2, 5):
        bench.credit(grant)
    assert [after for _, _, after in bench.memory.packed] == [(1, 11), (1, 11), (2, 11), (2, 11)]
    assert {form.digest for _, form, _ in bench.memory.packed} == {"xxh3"}


def test_a_pushed_slab_is_announced_when_it_has_landed() -> None:
    bench = Bench(lands=False)
    bench.send()
    assert bench.credit(1) == []
    assert bench.session.turn() == POLL_S
    assert headers(bench.land(1)) == [0]
    assert bench.session.turn() > POLL_S


def test_the_next_slab_is_packed_while_the_last_one_flies() -> None:
    bench = Bench(lands=False)
    bench.send()
    for grant in (1, 2, 3):
        assert bench.credit(grant) == []
    assert len(bench.memory.packed) == 3
    assert len(bench.outlet.flying) == 3


def test_headers_leave_in_order_though_slabs_land_in_any() -> None:
    """So that a receiver that misses one knows that it was lost."""
    bench = Bench(lands=False)
    bench.send()
    for grant in (1, 2, 3):
        bench.credit(grant)
    assert bench.land(2) == []
    assert headers(bench.land(1)) == [0, 1]
    assert headers(bench.land(0)) == [2]


def test_another_transfer_does_not_wait_for_what_is_in_flight() -> None:
    bench = Bench(lands=False)
    bench.send()
    bench.send(attempt=2, lease=2)
    bench.credit(1)
    bench.credit(2, lease=2)
    (header,) = bench.land(2)
    assert header.header.lease == 2


def test_time_in_flight_and_without_memory_is_counted() -> None:
    bench = Bench(lands=False)
    transfer = bench.send()
    bench.clock.now += 0.5
    said = []
    for grant in range(1, 5):
        bench.credit(grant)
        bench.clock.now += 0.25
        said += bench.land(grant % NUM_SLABS)
        bench.ack(said[-1])
    account = bench.events[0].account
    assert account.wire_s == 4 * 0.25
    # Half a second at first; then three more slabs wait while one is packed and flies.
    assert account.credit_s == 0.5 + 3 * 1.25
    assert account.wall_s == 0.5 + 4 * 1.25
    assert transfer.tail_nbytes == NBYTES


def test_only_what_follows_the_computation_is_exposed() -> None:
    bench = Bench()
    transfer = bench.begin()
    bench.computed(transfer, 1, TOKENS.end)
    for grant in (1, 2):
        bench.ack(*bench.credit(grant))
    for _ in range(5):
        bench.clock.now += 2.0
        assert bench.hear(Beat()) == [], "all that is ready has arrived: nothing is overdue"
    (offer,) = bench.computed(transfer)
    assert isinstance(offer, Offer)
    for grant in (3, 4):
        bench.ack(*bench.credit(grant))
    account = bench.events[0].account
    assert (account.wall_s, account.exposed_s) == (14.0, 2.0)
    assert (transfer.tail_nbytes, transfer.overlapped_s) == (NBYTES // 2, 2.0)


def test_slabs_wait_for_the_least_number_of_bytes() -> None:
    bench = Bench()
    transfer = bench.begin(owed=OWED._replace(least_bytes=inf))
    assert bench.computed(transfer, 1, TOKENS.end) == []
    (offer,) = bench.computed(transfer)
    assert offer.slabs == 4


def test_pulled_slabs_are_announced_first_and_pushed_in_the_order_of_the_pulls() -> None:
    bench = Bench(is_pulled=True)
    bench.send()
    said = [message for grant in (1, 2) for message in bench.credit(grant)]
    assert headers(said) == [0, 1]
    assert bench.outlet.pushed == []
    assert bench.hear(Pull(slab=2, grant=2)) == []
    assert bench.hear(Pull(slab=1, grant=1)) == []
    assert [grant for _, grant, _ in bench.outlet.pushed] == [2, 1]
    bench.ack(said[0])
    assert len(bench.transfers[1].acked) == 1


def test_a_pull_is_honoured_even_when_the_transfer_has_ended() -> None:
    """The receiver has posted for it: nothing else would ever match."""
    bench = Bench(is_pulled=True, lands=False)
    transfer = bench.send()
    (header,) = bench.credit(1)
    bench.table.abort(key())
    assert bench.turn() == [
        Abort(key=key(), lease=1, reason=Reason.ABORTED),
        Return(slab=1, grant=1),
    ]
    assert bench.hear(Pull(slab=1, grant=1)) == []
    assert bench.outlet.pushed == [(1, 1, header.header.nbytes)]
    assert transfer.state is State.CLOSED


def test_a_pulled_slab_of_an_ended_transfer_goes_back_once_it_has_left() -> None:
    bench = Bench(is_pulled=True, lands=False)
    bench.send()
    bench.credit(1)
    bench.hear(Pull(slab=1, grant=1))
    bench.table.abort(key())
    assert bench.turn() == [Abort(key=key(), lease=1, reason=Reason.ABORTED)]
    assert bench.session.turn() == POLL_S
    assert bench.land(1) == [Return(slab=1, grant=1)]


def test_a_slab_in_flight_goes_back_once_it_has_landed() -> None:
    bench = Bench(lands=False)
    bench.send()
    bench.credit(1)
    bench.table.abort(key())
    assert bench.turn() == [Abort(key=key(), lease=1, reason=Reason.ABORTED)]
    assert bench.land(1) == [Return(slab=1, grant=1)]
    assert bench.turn() == []
