"""Whole transfers over gloo: pulled, aborted, rebuilt, resent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.frames import split, tag_of
from kvferry.kv_transfer.jobs import ReceiveDone, ReceiveFailed, SendDone, SendFailed

Over = Callable[[str], Any]


def test_moves_kv_between_block_sizes(pairs_over: Over) -> None:
    pair = pairs_over("gloo")()
    pair.expect()
    pair.send()
    received, sent = (event.account for event in pair.assert_both_done())
    assert received.transport == sent.transport == "gloo"
    assert received.nbytes == sent.nbytes == pair.tokens.length * pair.source.layout.token_bytes
    assert sent.resends == 0


def test_many_transfers_share_a_link(pairs_over: Over) -> None:
    pair = pairs_over("gloo")()
    for lease in range(1, 11):
        pair.expect(lease=lease, request=lease)
        pair.send(lease=lease, request=lease)
    for _ in range(10):
        assert isinstance(pair.received.next(), ReceiveDone)
        assert isinstance(pair.sent.next(), SendDone)
    assert pair.sender.num_links == 1


class Breaking:
    """A channel whose group is aborted at a pull, once among all channels of a test."""

    def __init__(self, inner: Any, left: list[int]) -> None:
        self._inner = inner
        self._left = left
        self._outlet: Any = None
        self.transport = inner.transport
        self.send, self.wake, self.close = inner.send, inner.wake, inner.close

    def open_outlet(self, *arguments: Any) -> Any:
        self._outlet = self._inner.open_outlet(*arguments)
        return self._outlet

    def receive(self, *arguments: Any) -> bytes | None:
        frame: bytes | None = self._inner.receive(*arguments)
        for one in () if frame is None else split(frame):
            if tag_of(one) == "pull":
                self._left[0] -= 1
                if self._left[0] == 0:
                    self._outlet.close()
        return frame


@pytest.mark.parametrize("pull", [1, 3, 5])
def test_an_aborted_group_is_built_anew_and_all_arrives(pairs_over: Over, pull: int) -> None:
    left, channels = [pull], []

    def wrap(channel: Any) -> Breaking:
        channels.append(Breaking(channel, left))
        return channels[-1]

    pair = pairs_over("gloo")(wrap=wrap)
    pair.expect()
    pair.send()
    _, sent = (event.account for event in pair.assert_both_done())
    assert len(channels) == 2
    assert left[0] < 0
    assert sent.nbytes >= pair.tokens.length * pair.source.layout.token_bytes


def test_a_transfer_that_is_given_up_leaves_the_link_in_step(pairs_over: Over) -> None:
    """Pulls of an ended transfer are honoured: the next one's slabs would meet their receives."""
    pair = pairs_over("gloo")()
    for lease in range(1, 9):
        pair.expect(lease=lease, request=lease)
        pair.send(lease=lease, request=lease)
        if lease % 2:
            pair.sender.abort(pair.key(lease))
    ended = [pair.sent.next() for _ in range(8)]
    received = [pair.received.next() for _ in range(8)]
    done = {event.key for event in ended if isinstance(event, SendDone)}
    assert {pair.key(lease) for lease in range(2, 9, 2)} <= done
    assert done <= {event.key for event in received if isinstance(event, ReceiveDone)}
    assert all(isinstance(event, ReceiveDone | ReceiveFailed) for event in received)
    assert pair.sender.num_links == 1
    pair.expect(lease=20, request=20)
    pair.send(lease=20, request=20)
    pair.assert_both_done()


def test_without_a_trusted_network_it_is_refused_by_name(pairs_over: Over) -> None:
    pair = pairs_over("gloo")(choices=Choices())
    pair.expect()
    pair.send()
    failed = pair.sent.next()
    assert isinstance(failed, SendFailed)
    assert "gloo: needs transfer.trusted_network" in failed.detail
