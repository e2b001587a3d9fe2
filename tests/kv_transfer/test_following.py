"""Slabs that are scattered while they are filled: faster where it works, and never believed before
their header.
"""

from __future__ import annotations

from typing import Any

import pytest
from followed import LARGE, assert_followed
from lease_table import MOVES, ONE, Leases, header
from receiver_bench import SLAB_BYTES, Bench

from kvferry.core.errors import ProtocolError
from kvferry.kernels.kv_pack.host_compiled import compiled_pack
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.frames import encode_all
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.messages import Abort, Ack, Credit, Filling, Header, Return
from kvferry.kv_transfer.states import State


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.inlet.word = memoryview(bytearray(8))
    bench.memory.followed = [0]
    return bench


def followed(bench: Bench) -> int:
    return bench.leases.table.counters.tallies[Tally.FOLLOWED]


def acked(credit: Credit, index: int) -> list[Ack]:
    return [Ack(lease=1, index=index, grant=credit.grant)]


def test_what_was_followed_is_not_scattered_again(bench: Bench) -> None:
    (credit,) = bench.offer()
    assert bench.filling(credit, 0) == []
    ((move, progress),) = bench.memory.follows
    assert (move.index, progress.grant) == (0, credit.grant)
    assert bench.leases.state() is State.OFFERED
    assert bench.fill(credit, 0) == acked(credit, 0)
    assert bench.memory.scattered == []
    assert followed(bench) == 1


@pytest.mark.parametrize(("index", "digests"), [(0, [1]), (1, [0])])
def test_a_header_of_something_else_has_its_slab_scattered(
    bench: Bench, index: int, digests: list[int]
) -> None:
    (credit,) = bench.offer()
    bench.filling(credit, 0)
    bench.memory.found = digests
    assert acked(credit, index)[0] in bench.fill(credit, index, digests=digests)
    assert bench.memory.scattered == [index]
    assert followed(bench) == 0


def test_a_pack_that_does_not_go_on_is_scattered_later(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.memory.followed = None
    assert bench.filling(credit, 0) == []
    assert bench.fill(credit, 0) == acked(credit, 0)
    assert bench.memory.scattered == [0]


def test_another_scatter_of_the_lease_in_between_makes_it_worthless(bench: Bench) -> None:
    """It may have written over the same blocks."""
    first, second = bench.offer(2)
    bench.filling(first, 0)
    assert acked(second, 1)[0] in bench.fill(second, 1)
    assert bench.fill(first, 0) == acked(first, 0)
    assert bench.memory.scattered == [1, 0]
    assert followed(bench) == 0


def test_blocks_given_away_after_it_are_not_believed(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.filling(credit, 0)
    bench.memory.is_stale = True
    (said,) = bench.fill(credit, 0)
    assert isinstance(said, Abort)
    assert said.reason is Reason.STALE
    assert bench.memory.scattered == []


@pytest.mark.parametrize("changes", [{"wire": "bfloat16"}, {"chain_hash": b"x"}], ids=str)
def test_a_header_that_says_otherwise_than_its_filling_is_judged_by_itself(
    bench: Bench, changes: dict[str, Any]
) -> None:
    (credit,) = bench.offer()
    bench.filling(credit, 0)
    (said,) = bench.fill(credit, 0, **changes)
    assert isinstance(said, Abort)
    assert said.reason is Reason.MISMATCH
    assert followed(bench) == 0


def test_a_followed_slab_waits_while_another_one_of_its_lease_is_scattered(bench: Bench) -> None:
    (credit,) = bench.offer()
    bench.leases.offer()
    bench.filling(credit, 0)
    bench.leases.claim(1)
    assert bench.fill(credit, 0) == []
    bench.leases.settle(1)
    assert bench.turn() == acked(credit, 0)
    assert bench.memory.scattered == [0], "and is scattered again after that"


def test_a_slab_is_settled_before_the_next_one_is_followed(bench: Bench) -> None:
    """Both messages come in one frame; and the answer does not wait for the second slab."""
    first, second = bench.offer(2)
    bench.filling(first, 0)
    said: list[list[Any]] = []
    bench.memory.in_follow = lambda: said.append(list(bench.channel.sent))
    messages = [
        Header(slab=first.slab, grant=first.grant, header=header(MOVES[0])),
        Filling(slab=second.slab, grant=second.grant, header=header(MOVES[1], digests=[])),
    ]
    bench.link.handle(encode_all(messages))
    assert said == [acked(first, 0)]
    bench.turn()
    assert bench.fill(second, 1) == acked(second, 1)
    assert (followed(bench), bench.memory.scattered) == (2, [])


def test_only_slabs_that_are_granted_and_shared_are_followed(bench: Bench) -> None:
    first, second = bench.offer(2)
    bench.filling(Credit(lease=1, slab=first.slab, grant=first.grant + 9), 0)
    bench.filling(Credit(lease=1, slab=99, grant=1), 0)
    bench.filling(first, 0, lease=2)
    bench.fill(second, 1)
    bench.filling(second, 1)
    bench.inlet.word = None
    bench.filling(first, 0)
    assert bench.memory.follows == []


@pytest.mark.parametrize(
    "changes", [{"attempt": 2}, {"wire": "bfloat16"}, {"nbytes": 64}, {"chain_hash": b"x"}], ids=str
)
def test_a_slab_that_cannot_be_part_of_the_lease_is_not_followed(
    bench: Bench, changes: dict[str, Any]
) -> None:
    """What is wrong with it is said at its header."""
    (credit,) = bench.offer()
    assert bench.filling(credit, 0, **changes) == []
    assert bench.memory.follows == []
    assert bench.leases.state() is State.OFFERED
    (said,) = bench.fill(credit, 0, **changes)
    assert isinstance(said, Abort)


def test_more_bytes_than_a_slab_has_end_the_link(bench: Bench) -> None:
    (credit,) = bench.offer()
    with pytest.raises(ProtocolError, match="bytes in a slab"):
        bench.filling(credit, 0, nbytes=SLAB_BYTES + 1)


def test_no_slab_is_followed_while_another_one_of_its_lease_is_scattered() -> None:
    leases = Leases()
    leases.expect()
    bench, other = Bench(leases), Bench(leases)
    for one in (bench, other):
        one.inlet.word, one.memory.followed = memoryview(bytearray(8)), [0]
    (credit,), (theirs,) = bench.offer(), other.offer()
    bench.memory.in_follow = lambda: other.filling(theirs, 1) and None
    bench.filling(credit, 0)
    assert other.memory.follows == []


def test_a_lease_that_ends_while_a_slab_is_followed_waits_for_that(bench: Bench) -> None:
    states: list[State | None] = []

    def release() -> None:
        bench.leases.table.release(ONE)
        states.append(bench.leases.state())
        assert bench.leases.events == []

    (credit,) = bench.offer()
    bench.memory.in_follow = release
    bench.filling(credit, 0)
    assert states == [State.CLOSING]
    assert bench.leases.state() is State.CLOSED
    assert len(bench.leases.events) == 1
    (said,) = bench.fill(credit, 0)
    assert isinstance(said, Abort)


def test_a_slab_may_be_given_back_after_it(bench: Bench) -> None:
    """Its sender found that a block had been given away."""
    (credit,) = bench.offer()
    bench.filling(credit, 0)
    assert bench.hear(Return(slab=credit.slab, grant=credit.grant)) == []
    assert bench.leases.state() is State.OFFERED
    (again,) = bench.offer()
    assert again.slab == credit.slab
    bench.memory.found = [1]
    assert bench.fill(again, 0, digests=[1]) == acked(again, 0)
    assert bench.memory.scattered == [0]


@pytest.mark.skipif(compiled_pack() is None, reason="the installation built no host pack")
def test_whole_transfers_are_followed_and_equal(make_pair) -> None:
    assert_followed(make_pair(16, 16, **LARGE))
