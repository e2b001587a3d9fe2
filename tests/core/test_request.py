from __future__ import annotations

import pytest

from kvferry.core.ids import AttemptKey, Incarnation, RequestId, new_incarnation
from kvferry.core.request import Timeline, Usage


def test_time_per_output_token_counts_the_gaps() -> None:
    assert Timeline(decode_s=1.0, output_tokens=5).tpot_s == pytest.approx(0.25)
    assert Timeline(decode_s=1.0, output_tokens=1).tpot_s == 0.0
    assert Timeline().tpot_s == 0.0


def test_transfer_rate_is_bytes_over_busy_time() -> None:
    timeline = Timeline(transfer_bytes=3 * 10**9, transfer_scatter_s=1.5, transfer_wall_s=9.0)
    assert timeline.scatter_gb_per_s == pytest.approx(2.0)
    assert Timeline(transfer_bytes=1).scatter_gb_per_s == 0.0


def test_usage_adds_up() -> None:
    assert Usage(prompt_tokens=5, completion_tokens=7).total_tokens == 12


def test_later_attempts_sort_after_earlier_ones() -> None:
    first = AttemptKey(Incarnation(7), RequestId(1), 1)
    assert first < first._replace(attempt=2)
    assert str(first) == "0000000000000007/1.1"


def test_incarnations_differ_and_fit_a_signed_integer() -> None:
    drawn = {new_incarnation() for _ in range(100)}
    assert len(drawn) == 100
    assert all(0 <= number < 2**63 for number in drawn)
