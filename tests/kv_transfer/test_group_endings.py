"""The last words of several transfers are one: of the first that was bad, after the last of all."""

from __future__ import annotations

import pytest
from group_fakes import KEY, account
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kv_transfer.group.endings import Endings, merged
from kvferry.kv_transfer.jobs import (
    Account,
    Reason,
    SendAborted,
    SendDone,
    SendEvent,
    SendFailed,
)

BAD = {
    "failed": SendFailed(KEY, Reason.TIMEOUT, "slow"),
    "aborted": SendAborted(KEY),
}


@given(st.lists(st.sampled_from(["done", "failed", "aborted"]), min_size=1, max_size=12))
def test_a_whole_ends_once_after_its_last_part_as_its_first_bad_part_did(words: list[str]) -> None:
    endings: Endings[SendEvent] = Endings(lambda event: event.key)
    endings.expect(KEY, len(words))
    ended, bad_seen = [], []
    for number, word in enumerate(words):
        event = BAD.get(word) or SendDone(KEY, account(nbytes=number))
        said = endings.add(event)
        bad_seen.append(said.is_first_bad)
        if said.ended is not None:
            ended.append((number, said.ended))
    bad = [word for word in words if word != "done"]
    assert [number for number, _ in ended] == [len(words) - 1]
    if bad:
        assert ended[0][1] == BAD[bad[0]]
        first = next(i for i, word in enumerate(words) if word != "done")
        # Nothing is left to give up when the last word itself was the bad one.
        expected = [i == first and i < len(words) - 1 for i in range(len(words))]
        assert bad_seen == expected
    else:
        assert ended[0][1].account.nbytes == sum(range(len(words)))
        assert not any(bad_seen)
    assert KEY not in endings


def test_a_key_under_way_is_not_expected_twice() -> None:
    endings: Endings[SendEvent] = Endings(lambda event: event.key)
    endings.expect(KEY, 1)
    with pytest.raises(ValueError, match="under way"):
        endings.expect(KEY, 1)


def test_parts_side_by_side_add_their_bytes_and_not_their_wall_time() -> None:
    both = merged(account(10, 1.0), account(30, 3.0))
    assert (both.nbytes, both.busy_s, both.wall_s, both.transport) == (40, 1.0, 3.0, "shm")
    assert merged(both, account(transport="tcp")).transport == "shm+tcp"
    assert merged(Account(), account()).transport == "shm"
