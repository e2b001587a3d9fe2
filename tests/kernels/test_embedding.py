"""Embedding in Triton's interpreter: rows copied bit for bit, zeros for other shards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_data import random_tensors

from kvferry.kernels.embedding import reference, wrapper

torch.set_num_threads(1)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_tokens=st.integers(1, 6),
    num_rows=st.integers(1, 20),
    # 2050: two programs a row, the second nearly empty.
    size=st.sampled_from([1, 5, 64, 100, 2050]),
    dtype=st.sampled_from(DTYPES),
    shard_start=st.integers(0, 30),
)
def test_equals_the_reference(
    seed: int, num_tokens: int, num_rows: int, size: int, dtype: torch.dtype, shard_start: int
) -> None:
    weight = random_tensors(seed)(num_rows, size, dtype=dtype)
    ids = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    out = wrapper.embedding(ids, weight, shard_start)
    expected = reference.embedding(ids, weight, shard_start)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    for token, row in zip(ids.tolist(), out, strict=True):
        inside = shard_start <= token < shard_start + num_rows
        assert torch.equal(row, weight[token - shard_start] if inside else torch.zeros_like(row))


@pytest.mark.parametrize("sizes", [(17,), (9, 8), (5, 1, 11)])
def test_the_sum_over_shards_is_the_embedding(sizes: tuple[int, ...], seeded: int) -> None:
    weight = random_tensors(seeded)(17, 40)
    ids = torch.randperm(17)
    total, start = torch.zeros(17, 40), 0
    for shard in weight.split(sizes):
        total += wrapper.embedding(ids, shard, start)
        start += len(shard)
    assert torch.equal(total, weight[ids])


def test_no_read_out_of_bounds_for_any_id() -> None:
    """The shard lies inside memory that holds NaN; ids around it and far beyond give zeros."""
    whole = torch.full((9, 32), torch.nan)
    whole[3:6] = 1.0
    wild = [2, 6, -1, -4, 2**31, 2**62, -(2**63), 2**63 - 1]
    ids = torch.tensor([*wild, 4])
    for start in (0, 1, 1000):
        for implementation in (wrapper, reference):
            out = implementation.embedding(ids + start, whole[3:6], start + 3)
            assert torch.equal(out[-1], torch.ones(32))
            assert not out[:-1].any()


def test_rows_may_be_strided() -> None:
    wide = random_tensors(3)(10, 48)
    ids = torch.tensor([9, 0, 3])
    assert torch.equal(wrapper.embedding(ids, wide[:, :32]), wide[ids, :32])


def test_no_tokens() -> None:
    assert wrapper.embedding(torch.empty(0, dtype=torch.int64), torch.ones(3, 8)).shape == (0, 8)


IDS = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("named", "ids", "weight", "shard_start"),
    [
        ("token_ids", IDS.int(), torch.ones(3, 8), 0),
        ("token_ids", torch.tensor([0, 1, 2, 3])[::2], torch.ones(3, 8), 0),
        ("token_ids", IDS[None], torch.ones(3, 8), 0),
        ("weight", IDS, torch.ones(8, 3).T, 0),
        ("weight", IDS, torch.ones(3, 8).double(), 0),
        ("weight", IDS, torch.ones(0, 8), 0),
        ("shard_start", IDS, torch.ones(3, 8), -1),
    ],
)
def test_bad_arguments_are_named(
    named: str, ids: torch.Tensor, weight: torch.Tensor, shard_start: int
) -> None:
    with pytest.raises(ValueError, match=rf"^{named}:"):
        wrapper.embedding(ids, weight, shard_start)
