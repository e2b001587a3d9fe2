"""Every transport that this machine has, from block to block: whole, damaged, given up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from unfollowed import Unfollowed

from kvferry.core.span import Span
from kvferry.kv_transfer.counters import Tally
from kvferry.kv_transfer.endpoints import TRANSPORTS
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone

pytestmark = pytest.mark.slow

TOKENS = Span(5, 300)


class Fickle(Unfollowed):
    """A memory that packs wrong bytes the first time that it packs a slab, once in three."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.layout, self.rank, self.digests = memory.layout, memory.rank, memory.digests
        self.is_fresh, self.scatter = memory.is_fresh, memory.scatter
        self.seen: set[int] = set()

    def pack(
        self, blocks: Any, move: Any, form: Any, slab: Any, after: object = None, *_: object
    ) -> list[int]:
        digests = self._memory.pack(blocks, move, form, slab, after)
        if move.index % 3 == 0 and move.index not in self.seen:
            slab[move.nbytes // 2] ^= 0x10
        self.seen.add(move.index)
        return digests


@pytest.fixture(params=[name for name in TRANSPORTS if TRANSPORTS[name].why_not() is None])
def make(request: pytest.FixtureRequest, pair_factory: Any) -> Iterator[Any]:
    factory = pair_factory(request.param)
    yield factory
    factory.close()


def test_moves_verifies_and_acknowledges(make: Any) -> None:
    pair = make(tokens=TOKENS)
    for number in range(1, 9):
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
    for _ in range(8):
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()
    assert pair.receiver.tallies == {Tally.LINK: 1}
    assert not pair.receiver.counters


def test_sends_damaged_slabs_again(make: Any) -> None:
    pair = make(tokens=TOKENS, wrap_source=Fickle)
    pair.expect()
    pair.send()
    done = pair.received.next()
    assert isinstance(done, ReceiveDone)
    pair.assert_equal()
    resends = pair.receiver.tallies[Tally.RESEND]
    assert resends > 1
    assert done.account.resends == pair.sent.next().account.resends == resends
    assert pair.receiver.counters == {Reason.DAMAGED: resends}


def test_goes_on_after_transfers_given_up_on_either_side(make: Any) -> None:
    pair = make(tokens=TOKENS, staging_bytes=4 * 8192)
    for number in range(1, 13):
        pair.expect(lease=number, request=number)
        pair.send(lease=number, request=number)
        if number % 3 == 0:
            pair.sender.abort(pair.key(request=number))
        elif number % 3 == 1:
            pair.receiver.release(number)
    for _ in range(12):
        pair.received.next()
        pair.sent.next()
    pair.expect(lease=99, request=99)
    pair.send(lease=99, request=99)
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()
    pair.received.assert_none()
    pair.sent.assert_none()
    assert Tally.LINK_LOST not in pair.receiver.tallies
