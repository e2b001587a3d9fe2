"""The share of attention in a decode step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.bench.attention_share import (
    CACHES,
    StepSizes,
    StepTimes,
    measure_shares,
    share_claim,
    share_row,
)
from kvferry.bench.limits import Limits
from kvferry.models.spec import read_spec


def test_a_step_of_each_type_of_cache(tiny_folder: Path) -> None:
    spec, sizes = read_spec(tiny_folder), StepSizes(batch=2, context=20, repeats=2)
    found = measure_shares(tiny_folder, spec, sizes)
    assert [times.cache for times in found] == list(CACHES)
    assert all(share > 0 for times in found for share in times.shares)


def test_shares_and_bytes(tiny_folder: Path) -> None:
    spec, sizes = read_spec(tiny_folder), StepSizes(batch=4, context=9, repeats=3)
    times = StepTimes(cache=torch.float32, whole=[2.0, 4.0, 2.0], attention=[1.0, 1.0, 0.5])
    other = StepTimes(cache=torch.int8, whole=[1.0], attention=[1.0])
    claim = share_claim([other, times])
    assert (claim.value, claim.met, claim.n) == (0.25, True, 3)
    limits = Limits(threads=1, flops_per_s=1.0, bytes_per_s=float(spec.kv_elements_per_token))
    row = share_row(times, spec, sizes, limits)
    assert row["of bytes/s"] == pytest.approx(4 * 10 * 4)
    assert row["engine"] == "kvferry, float32 cache"
