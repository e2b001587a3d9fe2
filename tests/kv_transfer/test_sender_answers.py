"""A sender's session on a virtual clock: answers, ends, timers, and what breaks the rules."""

from __future__ import annotations

import pytest
from lease_table import LAYOUT, NBYTES, TOKENS, key
from receiver_bench import OPTIONS
from sender_bench import NUM_SLABS, OWED, Bench

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.frames import encode
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
)
from kvferry.kv_transfer.states import State


def headers(said: list) -> list[int]:
    """The slabs announced; nothing else is said."""
    assert all(isinstance(message, Header) for message in said), said
    return [message.header.index for message in said]


@pytest.mark.parametrize("pull", [Pull(slab=1, grant=9), Pull(slab=2, grant=1)])
def test_a_pull_of_what_was_not_announced_ends_the_link(pull: Pull) -> None:
    bench = Bench(is_pulled=True)
    bench.send()
    bench.credit(1)
    with pytest.raises(ProtocolError, match="not announced"):
        bench.session.handle(encode(pull))


def test_a_pull_on_a_pushed_path_and_a_second_pull_end_the_link() -> None:
    """Whether the first has landed or is still in flight."""
    for bench in (Bench(), Bench(is_pulled=True), Bench(is_pulled=True, lands=False)):
        bench.send()
        bench.credit(1)
        if bench.outlet.is_pulled:
            bench.hear(Pull(slab=1, grant=1))
        pushed = list(bench.outlet.pushed)
        with pytest.raises(ProtocolError, match="not announced"):
            bench.session.handle(encode(Pull(slab=1, grant=1)))
        assert bench.outlet.pushed == pushed


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
    assert bench.hear(kind(lease=2, index=0, grant=1)) == [], "of a link that is gone"
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


def test_a_prompt_that_computes_for_long_is_not_overdue_whatever_else_is_sent() -> None:
    bench = Bench()
    slow = bench.begin()
    bench.computed(slow, 1, TOKENS.end)
    for grant in (1, 2):
        bench.ack(*bench.credit(grant))
    for attempt in range(2, 10):
        bench.clock.now += 2.0
        bench.hear(Beat())
        bench.send(attempt, attempt)
        bench.table.abort(key(attempt))
        bench.turn()
    assert slow.state is State.OFFERED
    assert not slow.retried


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
    assert bench.session.turn() == 0.0, "what is queued is read first"
    with pytest.raises(LinkLost, match="silent"):
        bench.session.turn()


def test_after_a_pause_of_ours_a_peer_that_spoke_is_not_silent() -> None:
    bench = Bench()
    for _ in range(2):
        bench.clock.now += 60.0
        assert bench.session.turn() == 0.0
        bench.session.handle(encode(Beat()))
        assert bench.session.turn() == pytest.approx(OPTIONS.beat_s)


def test_an_attempt_that_has_just_ended_gives_its_slabs_back_before_the_next_on_its_lease() -> None:
    bench = Bench()
    bench.send()
    bench.credit(1)
    bench.session.handle(encode(Abort(key=key(), lease=1, reason=Reason.UNKNOWN)))
    bench.begin(attempt=2)
    assert Return(slab=1, grant=1) in bench.turn()
    assert bench.transfers[1].job.key == key(2)


def test_a_credit_counts_once() -> None:
    bench = Bench()
    transfer = bench.send()
    (first,) = bench.credit(1)
    assert bench.credit(1) == []
    bench.ack(first)
    assert bench.credit(1) == []
    assert list(transfer.unsent) == [1, 2, 3]
    assert headers(bench.credit(2)) == [1]


def test_a_credit_for_a_slab_that_is_not_there_ends_the_link() -> None:
    bench = Bench()
    bench.send()
    with pytest.raises(ProtocolError, match="slab"):
        bench.session.handle(encode(Credit(lease=1, slab=NUM_SLABS, grant=1)))


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
