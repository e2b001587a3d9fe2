"""The system has no thread left: what needed one fails at once, and all goes on when there is one
again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strangers import is_closed_by_peer, open_socket

from kvferry.kv_transfer.jobs import Reason, SendFailed


@contextmanager
def no_threads() -> Iterator[None]:
    """No stack of a new one fits into memory."""
    threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(0)


def test_a_transfer_without_a_thread_for_its_link_fails(make_loopback_pair: Any) -> None:
    pair = make_loopback_pair()
    with no_threads():
        pair.send()
    event = pair.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.INTERNAL)
    assert "thread" in event.detail
    assert pair.sender.num_links == 0
    pair.assert_works(lease=2, attempt=2)


def test_a_connection_without_a_thread_for_it_is_closed(make_shm_pair: Any) -> None:
    pair = make_shm_pair()
    with no_threads(), open_socket(pair.receiver.endpoints[0]) as sock:
        assert is_closed_by_peer(sock)
    pair.assert_works(lease=2, attempt=2)
