"""Transfers whose slabs are scattered while they are filled."""

from __future__ import annotations

from typing import Any

from kvferry.core.span import Span
from kvferry.kv_transfer.counters import Tally

LARGE: dict[str, Any] = {
    "tokens": Span(5, 5000),
    "slab_bytes": 1 << 22,
    "staging_bytes": 1 << 23,
}
"""Of a pair: slabs of several tiles in the cache of the tests."""


AT_LEAST, AT_MOST = 8, 200
"""Transfers."""


def assert_followed(pair: Any) -> None:
    """Several transfers arrive, whole and equal, and of some the slab was followed: one that loses
    the processor for too long is scattered later. On a busy machine those are most.
    """
    for attempt in range(1, AT_MOST + 1):
        if attempt > AT_LEAST and pair.receiver.tallies[Tally.FOLLOWED]:
            break
        pair.expect(lease=attempt, attempt=attempt)
        pair.send(lease=attempt, attempt=attempt)
        _, sent = pair.assert_both_done()
        assert sent.account.resends == 0
        pair.target.slots.zero_()
    assert pair.receiver.tallies[Tally.FOLLOWED] > 0
    assert not pair.receiver.counters
