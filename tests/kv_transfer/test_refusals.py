"""What is refused, or fails by itself: blocks given away, what does not fit, defects."""

from __future__ import annotations

import time
from typing import Any

import pytest
from unfollowed import Unfollowed

from kvferry.core.errors import ConfigError
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.jobs import (
    Reason,
    ReceiveFailed,
    SendFailed,
)
from kvferry.kv_transfer.receiver import KvReceiver

pytestmark = pytest.mark.slow


class Giveaway(Unfollowed):
    """A memory whose blocks are given away at some call."""

    def __init__(self, memory: Any, generations: Any, when: str) -> None:
        self._memory, self._generations, self._when = memory, generations, when
        self.layout, self.rank, self.digests = memory.layout, memory.rank, memory.digests

    def is_fresh(self, *arguments: Any) -> bool:
        return self._memory.is_fresh(*arguments)

    def pack(self, *arguments: Any) -> list[int]:
        return self._copy("pack", *arguments)

    def scatter(self, *arguments: Any) -> list[int]:
        return self._copy("scatter", *arguments)

    def _copy(self, name: str, *arguments: Any) -> list[int]:
        digests = getattr(self._memory, name)(*arguments)
        if self._when == "during":
            self._generations += 1
        return digests


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_block_given_away_on_the_sender_is_never_shipped(make_pair, when: str) -> None:
    pair = make_pair(
        wrap_source=lambda memory: Giveaway(memory, memory._generations, when),
        slab_bytes=1 << 16,
    )
    if when == "before":
        pair.source.generations += 1
    pair.expect()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.STALE)
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.ABORTED)
    assert not pair.target.slots.any()


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_block_given_away_on_the_receiver_fails_the_lease(make_pair, when: str) -> None:
    pair = make_pair(wrap_target=lambda memory: Giveaway(memory, memory._generations, when))
    if when == "before":
        pair.target.generations += 1
    pair.expect()
    pair.send()
    pair.assert_both_failed(Reason.STALE, Reason.STALE)
    assert when == "during" or not pair.target.slots.any()


def test_a_stale_attempt_is_refused_and_the_live_one_unharmed(make_pair) -> None:
    pair = make_pair()
    pair.expect(attempt=2)
    pair.send(attempt=1)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.STALE)
    pair.received.assert_none()
    assert pair.receiver.counters == {Reason.STALE: 1}
    pair.send(attempt=2)
    pair.assert_both_done()


def test_an_unknown_lease_is_refused(make_pair) -> None:
    pair = make_pair()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.UNKNOWN)
    assert pair.receiver.counters == {Reason.UNKNOWN: 1}
    pair.assert_works(attempt=2)


def test_a_deadline_needs_no_traffic(make_pair) -> None:
    """B001."""
    pair = make_pair()
    pair.expect(deadline_s=time.monotonic() + 0.1)
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.DEADLINE)
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    pair.assert_works(lease=2, attempt=2)


def test_layouts_that_cannot_be_bridged_fail_before_a_link_is_opened(make_pair) -> None:
    pair = make_pair(target_layout={"num_layers": 4})
    pair.expect()
    pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.MISMATCH)
    assert pair.sender.num_links == 0
    pair.received.assert_none()


def test_a_layout_that_was_announced_wrongly_is_found_by_the_lease(make_pair) -> None:
    pair = make_pair(target_layout={"num_layers": 4})
    pair.expect()
    pair.send(target=pair.source.layout)
    pair.assert_both_failed(Reason.MISMATCH, Reason.MISMATCH)


def test_other_content_than_expected_is_refused(make_pair) -> None:
    pair = make_pair()
    pair.expect(chain_hash=b"other")
    pair.send()
    pair.assert_both_failed(Reason.MISMATCH, Reason.MISMATCH)


def test_a_receiver_that_left_is_forgotten_and_its_successor_found(make_pair) -> None:
    """B006."""
    pair = make_pair()
    pair.assert_works()
    gone = pair.receiver.endpoints
    pair.receiver.close()
    pair.send(lease=2, attempt=2, endpoints=gone)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    pair.receiver = KvReceiver(
        pair.target.memory, pair.options, pair.received, [listen(gone[0].partition(":")[0])]
    )
    pair.assert_works(lease=3, attempt=3)
    assert pair.sender.num_links == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_a_pack_leaves_no_job_without_an_end(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    pair.expect()
    pair.send(target=pair.target.layout, blocks=None)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.INTERNAL)
    pair.assert_works(lease=2, attempt=2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_a_scatter_leaves_no_lease_without_an_end(make_loopback_pair) -> None:
    pair = make_loopback_pair()
    short = pair.target.blocks
    short = type(short)(block_ids=short.block_ids[:1], generations=short.generations[:1])
    pair.expect(blocks=short)
    pair.send()
    event = pair.received.next()
    assert (type(event), event.reason) == (ReceiveFailed, Reason.INTERNAL)
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.ENDED)
    pair.assert_works(lease=2, attempt=2)


def test_slabs_too_small_for_the_model_are_refused_at_start(make_pair) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.slab"):
        make_pair(slab_bytes=100)


def test_slabs_of_odd_size_work(make_pair) -> None:
    pair = make_pair(slab_bytes=1003)
    pair.assert_works()
