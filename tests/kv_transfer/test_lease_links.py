"""The links of one lease: ranks, waiting for each other, and who hears of its end."""

from __future__ import annotations

from functools import partial

import pytest
from lease_table import (
    LAYOUT,
    MOVES,
    NBYTES,
    ONE,
    PEER,
    TOKENS,
    Leases,
    Wakes,
    failed,
    header,
    key,
    offer,
)

from kvferry.core.ids import Incarnation
from kvferry.core.span import Span
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveDone,
    ReceiveFailed,
)
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.verdicts import Answer, Outcome, Source


@pytest.fixture
def leases() -> Leases:
    leases = Leases()
    leases.expect()
    return leases


@pytest.fixture
def offered(leases: Leases) -> Leases:
    assert leases.offer().answer is Answer.ACK
    return leases


def test_ranks_count_their_slabs_each_from_zero(leases: Leases) -> None:
    """Two of the sender's ranks have half of the heads each."""
    ranks = [Wakes(rank=rank) for rank in (0, 1)]
    moves = [
        SlabMove(0, LAYOUT.whole.layers, Span(rank, rank + 1), TOKENS, NBYTES // 2)
        for rank in (0, 1)
    ]
    for link in ranks:
        assert leases.offer(link, nbytes=NBYTES // 2, ranks=2).answer is Answer.ACK
    for link, move in zip(ranks, moves, strict=True):
        assert not leases.events
        slab = header(move)
        assert leases.table.claim(link.source, slab).answer is Answer.SCATTER
        leases.table.settle(link.source, slab, Outcome.VERIFIED, 0.0)
    (event,) = leases.events
    assert isinstance(event, ReceiveDone)
    assert event.account.nbytes == NBYTES
    # The rank whose slab came last knows by its Ack; the other is told.
    assert [link.count for link in ranks] == [1, 0]


@pytest.mark.parametrize(
    "announced",
    [
        [(0, NBYTES - 1, 1)],
        [(0, NBYTES + 1, 1)],
        [(0, NBYTES + 1, 2)],
        [(0, NBYTES // 2, 1)],
        [(0, NBYTES, 2), (1, 1, 2)],
        [(0, NBYTES // 2, 2), (1, NBYTES // 2 - 1, 2)],
        [(0, NBYTES // 2, 2), (0, NBYTES // 4, 2)],
    ],
    ids=str,
)
def test_parts_that_do_not_make_the_whole_fail_it(leases: Leases, announced) -> None:
    for rank, nbytes, ranks in announced[:-1]:
        assert leases.offer(Wakes(rank=rank), nbytes=nbytes, ranks=ranks).answer is Answer.ACK
    rank, nbytes, ranks = announced[-1]
    verdict = leases.offer(Wakes(rank=rank), nbytes=nbytes, ranks=ranks)
    assert (verdict.answer, verdict.reason) == (Answer.ABORT, Reason.MISMATCH)
    (event,) = leases.events
    assert isinstance(event, ReceiveFailed)
    assert str(nbytes) in event.detail or str(NBYTES) in event.detail


def test_a_slab_waits_for_another_links_scatter_and_is_woken(offered: Leases) -> None:
    other = Wakes(rank=1)
    assert offered.claim(0) is Answer.SCATTER
    assert offered.claim(1, other) is Answer.WAIT
    assert other.count == 0
    offered.settle(0)
    assert other.count == 1
    assert offered.claim(1, other) is Answer.SCATTER
    offered.settle(1, link=other)
    assert other.count == 1


def test_a_scatter_that_never_returns_fails_the_lease_of_those_that_wait(offered: Leases) -> None:
    offered.claim(0)
    verdict = offered.table.stuck(header(MOVES[1]))
    assert (verdict.answer, verdict.reason) == (Answer.ABORT, Reason.TIMEOUT)
    assert not offered.events
    assert offered.settle(0).answer is Answer.ABORT
    assert offered.events == [failed(Reason.TIMEOUT, "a scatter is stuck")]


def test_a_stuck_slab_of_another_attempt_fails_nothing(offered: Leases) -> None:
    offered.claim(0)
    offered.table.stuck(header(MOVES[1], attempt=2))
    offered.table.stuck(header(MOVES[1], lease=2))
    assert offered.settle(0).answer is Answer.ACK


def test_another_life_of_the_sender_is_refused_and_counted(offered: Leases) -> None:
    restarted = Wakes(peer=Incarnation(6))
    assert offered.offer(restarted).reason is Reason.STALE
    assert offered.claim(0, restarted) is Answer.ABORT
    assert offered.table.recall(restarted.source, header(MOVES[0])) is None
    offered.table.abort(restarted.source, key(), ONE, "")
    assert offered.table.gap(restarted.source, header(MOVES[1])) is None
    assert offered.table.counters.dropped == {Reason.STALE: 2, Reason.FOREIGN: 1}
    assert not offered.events
    assert offered.claim(0) is Answer.SCATTER


def test_a_gap_is_named_once_per_rank(offered: Leases) -> None:
    ranks = [Wakes(rank=rank).source for rank in (0, 1)]
    gaps = [
        (offered.table.gap(ranks[rank], header(MOVES[0], index=index)))
        for rank, index in [(0, 0), (0, 3), (0, 1), (0, 3), (1, 1), (0, 4), (1, 2), (0, 9)]
    ]
    assert gaps == [None, Span(1, 3), None, None, Span(0, 1), None, None, Span(5, 9)]
    assert offered.table.counters.tallies == {Tally.GAP: 3}
    assert offered.table.gap(ranks[0], header(MOVES[0], lease=9, index=5)) is None


def test_an_end_wakes_the_links_that_offered_but_not_the_one_that_aborted(offered: Leases) -> None:
    other, stranger = Wakes(rank=1), Wakes(rank=2)
    assert offered.offer(other, nbytes=0).answer is Answer.ACK
    offered.table.abort(offered.link.source, key(), ONE, "")
    assert (offered.link.count, other.count, stranger.count) == (0, 1, 0)


def test_links_are_woken_in_the_order_in_which_they_offered(leases: Leases) -> None:
    woken: list[int] = []
    for rank in range(12):
        source = Source(PEER, rank, "loopback", partial(woken.append, rank))
        assert leases.table.offered(source, offer(nbytes=0, ranks=13)).answer is Answer.ACK
    leases.table.release(ONE)
    assert woken == list(range(12))
