"""Slab memory of a receiver: a fixed pool, one slab for each link at least, idle links give way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_link import ScriptedLink

from kvferry.core.errors import LinkRefused
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone
from kvferry.kv_transfer.staging import MAX_SLABS_PER_LINK, StagingPool

SLAB = 8192


@given(st.integers(1, 300), st.integers(1, 50), st.lists(st.integers(0, 20), max_size=60))
def test_slabs_are_never_given_twice_and_all_come_back(total, expected, steps) -> None:
    pool = StagingPool(total, expected)
    taken: list[int] = []
    for step in steps:
        if step < 12 or not taken:
            num_slabs = pool.take()
            assert bool(num_slabs) == (sum(taken) < total)
            assert num_slabs <= MAX_SLABS_PER_LINK
            taken.append(num_slabs)
        else:
            pool.give_back(taken.pop(step % len(taken)))
        assert pool.num_free == total - sum(taken) >= 0


@pytest.mark.parametrize(("total", "expected"), [(32, 8), (32, 1), (32, 2), (128, 4), (4, 8)])
def test_expected_links_have_equal_shares_and_unexpected_ones_find_room(total, expected) -> None:
    pool = StagingPool(total, expected)
    taken = [pool.take() for _ in range(expected + 2)]
    assert min(taken[: min(total, expected)]) >= 1
    if total >= 4 * expected > 4:
        assert len(set(taken[: expected // 2])) == 1
    if total > expected:
        assert taken[expected] >= 1


def links(pair: Any, count: int, first: int = 100) -> list[ScriptedLink]:
    """Links of as many peers."""
    return [ScriptedLink(pair, incarnation=first + i) for i in range(count)]


def close(opened: list[ScriptedLink]) -> None:
    for link in opened:
        link.close()


def test_when_each_link_has_one_slab_in_use_a_further_one_is_refused(make_pair) -> None:
    pair = make_pair(staging_bytes=2 * SLAB)
    opened = links(pair, 2)
    try:
        for number, link in enumerate(opened, start=1):
            pair.expect(lease=number)
            link.offer(lease=number)
        with pytest.raises(LinkRefused, match="slab memory"):
            links(pair, 1, first=300)
        pair.send(lease=3)
        assert pair.sent.next().reason is Reason.REFUSED
        assert pair.receiver.tallies == {Tally.LINK: 2}
    finally:
        close(opened)


def test_the_link_with_most_slabs_gives_way_and_comes_back_smaller(make_pair) -> None:
    pair = make_pair(staging_bytes=3 * SLAB, expected_links=1)
    opened = []
    try:
        for number in (1, 2):
            pair.expect(lease=number)
            opened += links(pair, 1, first=number)
            opened[-1].offer(lease=number)
        opened += links(pair, 1, first=3)
        opened[0].assert_closed()
        opened += links(pair, 1, first=1)
        assert [link.num_slabs for link in opened] == [2, 1, 1, 1]
        opened[-1].offer()
        assert pair.receiver.tallies[Tally.LINK_RETIRED] == 1
    finally:
        close(opened)


def test_the_link_that_was_idle_for_longest_gives_its_slabs_to_a_new_one(make_pair) -> None:
    pair = make_pair(staging_bytes=3 * SLAB, beat_s=0.05, silence_s=5.0)
    pair.expect()
    opened = links(pair, 3)
    try:
        opened[2].offer()
        while True:
            # Idle for a beat: the receiver's own clock says when that is.
            try:
                opened += links(pair, 1, first=200)
                break
            except LinkRefused:
                continue
        opened[0].assert_closed()
        assert [link.is_closed() for link in opened[1:]] == [False] * 3
        assert pair.receiver.tallies[Tally.LINK_RETIRED] == 1
    finally:
        close(opened)


def test_a_sender_whose_idle_link_gave_way_opens_another_one(make_pair) -> None:
    pair = make_pair(staging_bytes=SLAB, beat_s=0.05)
    for number in range(1, 3):
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
        while True:
            try:
                close(links(pair, 1, first=100 * number))
                break
            except LinkRefused:
                continue
    pair.assert_equal()


def test_a_rank_that_comes_back_replaces_its_own_link(make_pair) -> None:
    """Though nothing told the receiver that the first one is gone."""
    pair = make_pair(staging_bytes=SLAB, silence_s=20.0, beat_s=5.0)
    pair.expect()
    first = ScriptedLink(pair)
    try:
        first.offer()
        second = ScriptedLink(pair)
        first.assert_closed()
        assert second.num_slabs == 1
        second.offer()
        second.close()
        assert pair.receiver.tallies[Tally.LINK_REPLACED] == 1
    finally:
        first.close()


def test_other_ranks_and_lives_of_a_peer_have_links_of_their_own(make_pair) -> None:
    pair = make_pair()
    opened = [ScriptedLink(pair), ScriptedLink(pair, rank=1), ScriptedLink(pair, incarnation=8)]
    try:
        for link in opened:
            pair.expect(lease=link.rank + 10 * link.incarnation)
            link.offer(lease=link.rank + 10 * link.incarnation)
        assert Tally.LINK_REPLACED not in pair.receiver.tallies
    finally:
        close(opened)


def test_with_as_many_links_as_slabs_every_one_moves(make_pair) -> None:
    """Whatever those before them had got."""
    count = 6
    pair = make_pair(staging_bytes=count * SLAB, expected_links=1, beat_s=5.0, silence_s=20.0)
    opened: dict[int, ScriptedLink] = {}
    try:
        waiting = list(range(1, count + 1))
        for number in waiting:
            pair.expect(lease=number)
        while waiting:
            number = waiting.pop(0)
            opened[number] = ScriptedLink(pair, incarnation=number)
            opened[number].offer(lease=number)
            retired = [other for other, link in opened.items() if link.is_closed()]
            for other in retired:
                opened.pop(other).close()
            waiting += retired
        assert sum(link.num_slabs for link in opened.values()) == count
    finally:
        close(list(opened.values()))
