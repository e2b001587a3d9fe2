"""The claims of the hand-off, from requests of known times."""

from __future__ import annotations

import pytest

from kvferry.bench.pd import Comparison, Request
from kvferry.core.request import Timeline


def request(ttft_s: float, gap_s: float, latency_s: float) -> Request:
    timeline = Timeline(transfer_bytes=4_000, transfer_scatter_s=1e-6, transfer_exposed_s=0.002)
    return Request(ttft_s, gap_s, (latency_s,) * 3, timeline)


def test_claims() -> None:
    comparison = Comparison(
        pd=[request(1.1, 0.13, 0.02), request(2.0, 0.11, 0.02), request(1.0, 0.16, 0.02)],
        colocated=[request(1.0, 0.02, 0.02), request(2.0, 0.02, 0.01), request(1.0, 0.02, 0.06)],
    )
    ratio, share = comparison.claims()
    assert (ratio.id, share.id) == ("pd_ttft_ratio", "handoff_gap_share")
    assert ratio.value == pytest.approx(1.0)
    assert (ratio.goal, ratio.met) == (1.10, True)
    assert comparison.gap_shares() == pytest.approx([0.1, 0.05, 0.1])
    assert share.value == pytest.approx(0.1)
    assert (share.goal, share.met, share.n) == (0.05, False, 3)


def test_rows_hold_the_transfer() -> None:
    comparison = Comparison([request(1.0, 0.1, 0.02)], [request(1.0, 0.02, 0.02)])
    row, _ = comparison.rows()
    assert row["transfer bytes"] == 4_000
    assert row["GB/s"] == pytest.approx(4.0)
    assert row["exposed ms"] == pytest.approx(2.0)
    assert row["1st gap ms"] == pytest.approx(100.0)
