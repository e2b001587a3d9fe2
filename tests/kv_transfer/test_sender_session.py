"""A sender's session on a virtual clock: offers, slabs in flight, pulls, answers, timers, ends."""

from __future__ import annotations

from math import inf

import pytest
from lease_table import LAYOUT, NBYTES, TOKENS, key
from receiver_bench import OPTIONS
from sender_bench import NUM_SLABS, OWED, Bench

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.jobs import Reason, SendAborted, SendDone
from kvferry.kv_transfer.messages import (
    Abort,
    Ack,
    Beat,
    Challenge,
    Complete,
    Credit,
    Header,
    Missing,
    Offer,
    Pull,
    Resend,
    Return,
    encode,
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
    bench.computed(transfer)
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


@pytest.mark.parametrize("pull", [Pull(slab=1, grant=9), Pull(slab=2, grant=1)])
def test_a_pull_of_what_was_not_announced_ends_the_link(pull: Pull) -> None:
    bench = Bench(is_pulled=True)
    bench.send()
    bench.credit(1)
    with pytest.raises(ProtocolError, match="not announced"):
        bench.session.handle(encode(pull))


def test_a_pull_on_a_pushed_path_and_a_second_pull_end_the_link() -> None:
    for bench in (Bench(), Bench(is_pulled=True)):
        bench.send()
        bench.credit(1)
        if bench.outlet.is_pulled:
            bench.hear(Pull(slab=1, grant=1))
        with pytest.raises(ProtocolError, match="not announced"):
            bench.session.handle(encode(Pull(slab=1, grant=1)))


def test_a_damaged_slab_is_the_next_to_be_granted() -> None:
    bench = Bench()
    bench.send()
    bench.credit(1)
    bench.credit(2)
    assert bench.hear(Resend(lease=1, index=0, grant=1)) == []
    assert headers(bench.credit(4)) == [0]
    assert headers(bench.credit(5)) == [2]
    assert bench.hear(Ack(lease=1, index=0, grant=1)) == [], "that grant is over"
    assert bench.transfers[1].account.resends == 1
    for index, grant in ((0, 4), (1, 2), (2, 5)):
        bench.hear(Ack(lease=1, index=index, grant=grant))
    bench.ack(*bench.credit(6))
    assert bench.events[0].account.nbytes == NBYTES + NBYTES // 4


@pytest.mark.parametrize("kind", [Ack, Resend])
def test_answers_about_other_grants_or_slabs_are_nothing(kind) -> None:
    bench = Bench(lands=False)
    transfer = bench.send()
    bench.credit(1)
    assert bench.hear(kind(lease=1, index=0, grant=7)) == []
    bench.land(1)
    assert bench.hear(kind(lease=1, index=3, grant=1)) == []
    assert (transfer.acked, list(transfer.unsent)) == (set(), [1, 2, 3])


def test_missing_headers_are_sent_again_unless_still_in_flight() -> None:
    bench = Bench(lands=False)
    bench.send()
    bench.credit(1)
    bench.land(1)
    for grant in (2, 3):
        bench.credit(grant)
    bench.land(2)
    assert headers(bench.hear(Missing(lease=1, begin=0, end=4))) == [0, 1]
    assert headers(bench.hear(Missing(lease=1, begin=1, end=2))) == [1]
    assert bench.hear(Missing(lease=9, begin=0, end=4)) == []


def test_a_credit_that_cannot_be_used_goes_back() -> None:
    bench = Bench()
    assert bench.credit(1, lease=5) == [Return(slab=1, grant=1)]
    bench.send()
    for grant in range(2, 6):
        bench.credit(grant)
    assert bench.credit(6) == [Return(slab=0, grant=6)]


def test_complete_is_an_acknowledgement_of_all() -> None:
    bench = Bench()
    bench.send()
    bench.credit(1)
    assert bench.hear(Complete(key=key(2), lease=1)) == [], "another attempt's"
    assert not bench.events
    assert bench.hear(Complete(key=key(), lease=1)) == [Return(slab=1, grant=1)]
    assert isinstance(bench.events[0], SendDone)


def test_complete_before_all_is_computed_cannot_be() -> None:
    bench = Bench()
    bench.computed(bench.begin(), 1, TOKENS.end)
    (abort,) = bench.hear(Complete(key=key(), lease=1))
    assert (type(abort), bench.failed()) == (Abort, Reason.MISMATCH)


def test_the_receivers_abort_fails_the_transfer_and_gives_all_back() -> None:
    bench = Bench()
    bench.send()
    bench.credit(1)
    assert bench.hear(Abort(key=key(2), lease=1, reason=Reason.ENDED)) == [], "another attempt's"
    said = bench.hear(Abort(key=key(), lease=1, reason=Reason.DEADLINE, detail="late"))
    assert said == [
        Abort(key=key(), lease=1, reason=Reason.DEADLINE, detail="late"),
        Return(slab=1, grant=1),
    ]
    assert bench.failed() is Reason.DEADLINE
    assert bench.transfers == {}


@pytest.mark.parametrize("stale_after", [0, 1])
def test_a_block_given_away_before_or_during_a_pack_is_never_announced(stale_after: int) -> None:
    bench = Bench()
    bench.send()
    bench.memory.stale_after = stale_after
    abort, returned = bench.credit(1)
    assert (type(abort), abort.reason) == (Abort, Reason.STALE)
    assert returned == Return(slab=1, grant=1)
    assert len(bench.memory.packed) == stale_after
    assert bench.outlet.pushed == []
    assert bench.failed() is Reason.STALE


def test_an_abort_during_a_pack_takes_effect_when_it_returns() -> None:
    bench = Bench()
    transfer = bench.send()

    def abort() -> None:
        bench.table.abort(key())
        assert (transfer.state, bench.events) == (State.CLOSING, [])

    bench.memory.in_pack = abort
    assert bench.credit(1) == [
        Abort(key=key(), lease=1, reason=Reason.ABORTED),
        Return(slab=1, grant=1),
    ]
    assert bench.events == [SendAborted(key())]
    assert bench.outlet.pushed == []


def test_a_transfer_that_does_not_move_is_sent_once_more_then_fails() -> None:
    """B009."""
    bench = Bench()
    bench.send()
    bench.credit(1)
    timeout_s = OPTIONS.progress_timeout_s
    for _ in range(int(timeout_s) - 1):
        bench.clock.now += 1.0
        assert bench.hear(Beat()) == []
    bench.clock.now += 1.0
    offer, header = bench.hear(Beat())
    assert offer == Offer(key=key(), lease=1, slabs=3, nbytes=NBYTES, ranks=2)
    assert headers([header]) == [0]
    for _ in range(int(timeout_s) - 1):
        bench.clock.now += 1.0
        assert bench.hear(Beat()) == []
    bench.clock.now += 1.0
    abort, returned = bench.hear(Beat())
    assert (type(abort), returned) == (Abort, Return(slab=1, grant=1))
    assert bench.failed() is Reason.TIMEOUT


def test_the_session_asks_to_be_called_when_a_transfer_is_overdue() -> None:
    bench = Bench()
    bench.send()
    bench.clock.now += OPTIONS.progress_timeout_s - OPTIONS.beat_s / 2
    bench.session.handle(encode(Beat()))
    assert bench.session.turn() == pytest.approx(OPTIONS.beat_s / 2)


def test_a_silent_peer_is_lost_and_we_are_not_silent() -> None:
    bench = Bench()
    bench.turn()
    assert bench.session.turn() == pytest.approx(OPTIONS.beat_s)
    bench.clock.now += OPTIONS.beat_s
    bench.session.turn()
    assert list(bench.channel.sent) == [Beat()]
    bench.clock.now += OPTIONS.silence_s
    with pytest.raises(LinkLost, match="silent"):
        bench.session.turn()


def test_a_broken_path_ends_the_link() -> None:
    bench = Bench(lands=False)
    bench.send()
    bench.credit(1)
    bench.outlet.is_broken = True
    with pytest.raises(LinkLost, match="broke"):
        bench.session.turn()


def test_messages_of_the_handshake_end_the_link() -> None:
    bench = Bench()
    with pytest.raises(ProtocolError, match="handshake"):
        bench.session.handle(encode(Challenge(protocol=2, nonce=bytes(32))))


def test_a_slab_too_small_for_a_token_fails_the_transfer() -> None:
    bench = Bench()
    wide = OWED._replace(head_bytes=LAYOUT.head_bytes * 8)
    (abort,) = bench.computed(bench.begin(owed=wide))
    assert (abort.reason, bench.failed()) == (Reason.MISMATCH, Reason.MISMATCH)


def test_a_new_link_carries_on_where_the_old_one_was_lost() -> None:
    bench = Bench(lands=False)
    transfer = bench.send()
    bench.credit(1)
    bench.ack(*bench.land(1))
    bench.credit(2)
    bench.session.close()
    assert bench.outlet.closed
    bench.table.lost(transfer)
    assert transfer.state is State.WAITING
    bench.open()
    (offer,) = bench.said()
    assert (type(offer), offer.slabs) == (Offer, 3)
    bench.outlet.lands = True
    for grant in (1, 2, 3):
        bench.ack(*bench.credit(grant))
    assert isinstance(bench.events[0], SendDone)
    assert [move.index for move, _, _ in bench.memory.packed] == [0, 1, 1, 2, 3]


def test_credits_of_several_transfers_are_used_in_their_order() -> None:
    bench = Bench()
    bench.send()
    bench.send(attempt=2, lease=2)
    for message in (
        Credit(lease=2, slab=0, grant=1),
        Credit(lease=1, slab=1, grant=2),
        Credit(lease=2, slab=2, grant=3),
    ):
        bench.session.handle(encode(message))
    assert [(m.header.lease, m.header.index) for m in bench.turn()] == [(2, 0), (1, 0), (2, 1)]
