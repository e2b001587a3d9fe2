"""The system has no thread left: what needed one fails at once, and all goes on when there is one
again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strangers import is_closed_by_peer, open_socket

from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone, SendFailed


@contextmanager
def no_threads() -> Iterator[None]:
    """No stack of a new one fits into memory."""
    threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(0)


def assert_works(pair: Any) -> None:
    pair.expect(lease=2, attempt=2)
    pair.send(lease=2, attempt=2)
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()


def test_a_transfer_without_a_thread_for_its_link_fails(make_loopback_pair: Any) -> None:
    pair = make_loopback_pair()
    with no_threads():
        pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.INTERNAL)
    assert "thread" in event.detail
    assert pair.sender.num_links == 0
    assert_works(pair)


def test_a_connection_without_a_thread_for_it_is_closed(make_shm_pair: Any) -> None:
    pair = make_shm_pair()
    with no_threads(), open_socket(pair.receiver.endpoints[0]) as sock:
        assert is_closed_by_peer(sock)
    assert_works(pair)
