"""Slabs whose digests are sealed beside them: acknowledged without a header, and never believed
unless the seal is of what was written.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sender_bench
from lease_table import MOVES, ONE, header, key
from receiver_bench import Bench

from kvferry.kernels.kv_pack.progress import WORD_BYTES, Progress, progress_words
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.messages import (
    Abort,
    Ack,
    Credit,
    Filling,
    Header,
    Message,
    Missing,
    Return,
)
from kvferry.kv_transfer.states import State


@pytest.fixture
def bench() -> Bench:
    """A receiver whose follows write slabs of one tile with digest 5."""
    bench = Bench()
    bench.inlet.word = memoryview(bytearray(WORD_BYTES))
    bench.memory.followed = [5]
    return bench


def seals(bench: Bench, credit: Credit, digests: list[int], grant: int = 0) -> Callable[[], None]:
    """What the sender does meanwhile."""
    assert bench.inlet.word is not None
    return lambda: Progress(bench.inlet.word, grant or credit.grant).seal(digests)


def asked(index: int) -> list[Message]:
    return [Missing(lease=1, begin=index, end=index + 1)]


def acked(credit: Credit, index: int) -> list[Message]:
    return [Ack(lease=1, index=index, grant=credit.grant)]


def test_a_sealed_slab_is_acknowledged_at_once(bench: Bench) -> None:
    first, second = bench.offer(2)
    bench.memory.in_follow = seals(bench, first, [5])
    assert bench.sealed(first, 0) == acked(first, 0)
    bench.memory.in_follow = seals(bench, second, [5])
    assert bench.sealed(second, 1) == acked(second, 1)
    assert bench.memory.scattered == []
    assert bench.leases.table.counters.tallies[Tally.FOLLOWED] == 2
    assert bench.leases.state() is State.OFFERED


def test_its_memory_can_be_granted_again(bench: Bench) -> None:
    credits = bench.offer(6)
    bench.memory.in_follow = seals(bench, credits[0], [5])
    bench.sealed(credits[0], 0)
    (again,) = bench.offer(1)
    assert (again.slab, again.grant) == (credits[0].slab, credits[-1].grant + 1)


@pytest.mark.parametrize("digests", [[6], [5, 5], [0]], ids=str)
def test_a_seal_of_something_else_is_not_believed(bench: Bench, digests: list[int]) -> None:
    """Its header is asked for, and then the slab is scattered like any other."""
    (credit,) = bench.offer()
    bench.memory.in_follow = seals(bench, credit, digests)
    assert bench.sealed(credit, 0) == asked(0)
    assert bench.leases.state() is State.OFFERED
    bench.memory.found = [7]
    assert bench.fill(credit, 0, digests=[7]) == acked(credit, 0)
    assert bench.memory.scattered == [0]


def test_a_seal_of_an_earlier_use_is_not_believed(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.memory.in_follow = seals(bench, credit, [5], grant=credit.grant + 1)
    assert bench.sealed(credit, 0) == asked(0)


def test_what_was_followed_counts_at_its_header_when_the_seal_is_late(bench: Bench) -> None:
    (credit,) = bench.offer()
    assert bench.sealed(credit, 0) == asked(0)
    assert bench.fill(credit, 0, digests=[5]) == acked(credit, 0)
    assert bench.memory.scattered == []


def test_a_slab_that_nobody_announced_as_sealed_needs_its_header(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.memory.in_follow = seals(bench, credit, [5])
    assert bench.filling(credit, 0) == []
    assert bench.fill(credit, 0, digests=[5]) == acked(credit, 0)


def test_a_pack_that_does_not_go_on_is_asked_for(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.memory.followed = None
    assert bench.sealed(credit, 0) == asked(0)


def test_blocks_given_away_meanwhile_are_not_believed(bench: Bench) -> None:
    (credit,) = bench.offer()
    seal = seals(bench, credit, [5])

    def give_away() -> None:
        seal()
        bench.memory.is_stale = True

    bench.memory.in_follow = give_away
    assert bench.sealed(credit, 0) == asked(0)
    (said,) = bench.fill(credit, 0, digests=[5])
    assert isinstance(said, Abort)
    assert said.reason is Reason.STALE


def test_one_that_cannot_be_part_of_the_lease_is_judged_at_its_header(bench: Bench) -> None:
    (credit,) = bench.offer()
    assert bench.sealed(credit, 0, wire="bfloat16") == asked(0)
    assert bench.memory.follows == []
    (said,) = bench.fill(credit, 0, wire="bfloat16")
    assert isinstance(said, Abort)


def test_nothing_is_asked_about_a_grant_that_is_over(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.memory.in_follow = seals(bench, credit, [5])
    bench.sealed(credit, 0)
    assert bench.sealed(credit, 0) == []
    assert len(bench.memory.follows) == 1


def test_a_lost_one_is_missed_when_a_later_one_comes(bench: Bench) -> None:
    _, second = bench.offer(2)
    bench.memory.in_follow = seals(bench, second, [5])
    assert bench.sealed(second, 1) == asked(0) + acked(second, 1)


def test_a_lease_that_ends_meanwhile_is_not_acknowledged(bench: Bench) -> None:
    (credit,) = bench.offer()
    seal = seals(bench, credit, [5])

    def release() -> None:
        seal()
        bench.leases.table.release(ONE)

    bench.memory.in_follow = release
    (said,) = bench.sealed(credit, 0)
    assert isinstance(said, Abort)
    assert bench.leases.state() is State.CLOSED
    assert bench.leases.table.counters.tallies[Tally.FOLLOWED] == 0


class SealingBench(sender_bench.Bench):
    """A sender whose slabs are shared with its receiver."""

    def __init__(self, word_bytes: int = WORD_BYTES, *, lands: bool = True) -> None:
        super().__init__(lands=lands)
        memory = memoryview(bytearray(sender_bench.NUM_SLABS * WORD_BYTES))
        self.outlet.words = [word[:word_bytes] for word in progress_words(memory)]
        self.memory.followed_bytes = 0

    def is_sealed(self, grant: int) -> bool:
        assert self.outlet.words is not None
        word = self.outlet.words[grant % sender_bench.NUM_SLABS]
        # The fake's digest of a slab is its index.
        return Progress(word, grant).is_sealed_with([grant - 1])


def test_a_sealed_slab_is_announced_once() -> None:
    bench = SealingBench()
    bench.send()
    (filling,) = bench.credit(1)
    assert isinstance(filling, Filling)
    assert filling.is_sealed
    assert filling.header.digests == []
    assert bench.is_sealed(1)
    assert bench.hear(Ack(lease=1, index=0, grant=1)) == []
    assert bench.transfers[1].acked == {0}


def test_its_header_comes_when_it_is_missed() -> None:
    bench = SealingBench()
    bench.send()
    bench.credit(1)
    (said,) = bench.hear(Missing(lease=1, begin=0, end=1))
    assert isinstance(said, Header)
    assert (said.grant, said.header.index, said.header.digests) == (1, 0, [0])


def test_a_header_that_is_missed_in_flight_comes_once_it_has_landed() -> None:
    bench = SealingBench(lands=False)
    bench.send()
    (filling,) = bench.credit(1)
    assert bench.hear(Missing(lease=1, begin=0, end=1)) == []
    (said,) = bench.land(filling.slab)
    assert isinstance(said, Header)


def test_headers_of_sealed_slabs_are_sent_when_a_transfer_does_not_move() -> None:
    bench = SealingBench()
    bench.send()
    bench.credit(1)
    bench.clock.now += sender_bench.OPTIONS.progress_timeout_s
    bench.session.handle(sender_bench.encode(sender_bench.Beat()))
    assert [said.header.index for said in bench.turn() if isinstance(said, Header)] == [0]


def test_what_was_given_away_is_never_sealed() -> None:
    bench = SealingBench()
    bench.send()
    bench.memory.stale_after = 1
    said = bench.credit(1)
    assert [type(message) for message in said] == [Filling, Abort, Return]
    assert not bench.is_sealed(1)
    assert bench.failed() is Reason.STALE


def test_without_room_for_its_digests_a_slab_has_a_header() -> None:
    bench = SealingBench(word_bytes=8)
    bench.send()
    filling, said = bench.credit(1)
    assert isinstance(filling, Filling)
    assert not filling.is_sealed
    assert isinstance(said, Header)


def test_the_two_sides_agree() -> None:
    """What one of them leaves out the other does not need."""
    sending, receiving = SealingBench(), Bench()
    sending.send()
    (filling,) = sending.credit(1)
    (credit,) = receiving.offer()
    receiving.inlet.word = sending.outlet.words[filling.slab]
    receiving.memory.followed = [0]
    said = receiving.sealed(Credit(lease=1, slab=credit.slab, grant=filling.grant), 0)
    assert (credit.grant, header(MOVES[0]).key) == (filling.grant, key())
    assert said == acked(credit, 0)
