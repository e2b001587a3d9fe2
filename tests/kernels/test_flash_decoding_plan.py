"""The split plan: the kernel against the reference, and what every plan promises."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.chips import CHIPS, INTERPRETER
from kvferry.kernels.flash_decoding import reference, wrapper
from kvferry.kernels.flash_decoding.configs import Config
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import KvLayer

TILE = 16
MAX_LEN = 5000


@dataclasses.dataclass(frozen=True)
class Bucket:
    max_query_len: int
    lengths: list[tuple[int, int]]
    num_programs: int
    window: int | None
    invariant_split: int | None

    def plan(self) -> SplitPlan:
        """One program per SM and a single KV head: as many programs as SMs."""
        kv = KvLayer(*(torch.empty(1, 16, 1, 64, device="meta") for _ in range(2)))
        splits = SplitPlan.for_bucket(
            len(self.lengths),
            self.max_query_len,
            1,
            kv,
            MAX_LEN,
            dataclasses.replace(INTERPRETER, num_sms=self.num_programs),
            window=self.window,
            invariant_split=self.invariant_split,
            config=Config(tile=TILE, programs_per_sm=1),
        )
        names = ("items", "program_items", "seq_items")
        return dataclasses.replace(
            splits,
            **{name: torch.full(getattr(splits, name).shape, -1).int() for name in names},
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        context_lens = torch.tensor([context for context, _ in self.lengths], dtype=torch.int32)
        query_lens = torch.tensor([0, *(queries for _, queries in self.lengths)])
        return context_lens, query_lens.cumsum(0).to(torch.int32)

    def tiles(self, i_seq: int) -> range:
        context_len, num_queries = self.lengths[i_seq]
        if not num_queries:
            return range(0)
        first = 0 if self.window is None else max(0, context_len - self.window + 1)
        return range(first // TILE, (context_len + num_queries - 1) // TILE + 1)


@st.composite
def buckets(draw: st.DrawFn, most_seqs: int, most_programs: int) -> Bucket:
    max_query_len = draw(st.sampled_from([1, 4, 16]))
    context_lens = st.one_of(
        st.integers(0, 40),
        st.integers(0, MAX_LEN - 16),
        st.integers(0, 20).map(lambda n: n * 1024),
    )
    return Bucket(
        max_query_len,
        draw(
            st.lists(
                st.tuples(
                    context_lens.filter(lambda n: n <= MAX_LEN - 16),
                    st.integers(0, max_query_len),
                ),
                min_size=1,
                max_size=most_seqs,
            )
        ),
        draw(st.integers(1, most_programs)),
        draw(st.none() | st.integers(1, 3000)),
        draw(st.sampled_from([None, TILE, 10 * TILE, 1024])),
    )


@settings(max_examples=25)
@given(bucket=buckets(most_seqs=6, most_programs=5))
def test_kernel_equals_the_reference(bucket: Bucket) -> None:
    splits, expected = bucket.plan(), bucket.plan()
    wrapper.plan_splits(*bucket.tensors(), splits)
    reference.plan_splits(*bucket.tensors(), expected)
    assert torch.equal(splits.seq_items, expected.seq_items)
    assert torch.equal(splits.program_items, expected.program_items)
    num_items = int(expected.seq_items[-1])
    assert torch.equal(splits.items[:num_items, :3], expected.items[:num_items, :3])


@settings(max_examples=100)
@given(bucket=buckets(most_seqs=40, most_programs=70))
def test_every_tile_belongs_to_one_item_and_every_item_to_one_program(bucket: Bucket) -> None:
    splits = bucket.plan()
    reference.plan_splits(*bucket.tensors(), splits)
    seq_items, program_items = splits.seq_items.tolist(), splits.program_items.tolist()
    num_items = seq_items[-1]
    assert num_items <= len(splits.items)
    items = splits.items[:num_items].tolist()
    for i_seq in range(len(bucket.lengths)):
        own = items[seq_items[i_seq] : seq_items[i_seq + 1]]
        assert all(item[0] == i_seq and item[2] > 0 for item in own)
        covered = [tile for item in own for tile in range(item[1], item[1] + item[2])]
        assert covered == list(bucket.tiles(i_seq))
    assert program_items[0] == 0
    assert program_items[-1] == num_items
    assert program_items == sorted(program_items)
    loads = [
        sum(item[2] for item in items[first:last])
        for first, last in itertools.pairwise(program_items)
    ]
    fair = -(-sum(loads) // bucket.num_programs)
    assert max(loads) <= fair + max(0, splits.split_tiles - 1)


@settings(max_examples=50)
@given(
    bucket=buckets(most_seqs=10, most_programs=20),
    others=buckets(most_seqs=10, most_programs=20),
)
def test_batch_invariant_splits_do_not_know_the_batch(bucket: Bucket, others: Bucket) -> None:
    bucket = dataclasses.replace(bucket, invariant_split=160, max_query_len=16)
    context_len, num_queries = bucket.lengths[0]
    more = dataclasses.replace(bucket, lengths=[*others.lengths, (context_len, num_queries)])
    ranges = []
    for each, i_seq in ((bucket, 0), (more, len(others.lengths))):
        splits = each.plan()
        reference.plan_splits(*each.tensors(), splits)
        first, last = splits.seq_items[i_seq : i_seq + 2].tolist()
        ranges.append(splits.items[first:last, 1:3].tolist())
    assert ranges[0] == ranges[1]
    assert all(tile % 10 == 0 for tile, _ in ranges[0][1:])


def test_the_grid_follows_from_the_bucket_alone() -> None:
    """132 SMs x 2 programs, for 8 KV heads."""
    kv = KvLayer(*(torch.empty(1, 16, 8, 128, dtype=torch.bfloat16, device="meta"),) * 2)
    for num_seqs in (1, 64):
        splits = SplitPlan.for_bucket(num_seqs, 1, 32, kv, 32768, CHIPS["H200"])
        assert (splits.num_seqs, splits.num_programs) == (num_seqs, 33)
        assert splits.partial_out.shape == (num_seqs + 33, 8, 4, 128)


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("max_query_len", {"max_query_len": 0}),
        ("max_query_len", {"max_query_len": 17}),
        ("num_heads", {"num_heads": 3}),
        ("window", {"window": 0}),
        ("invariant_split", {"invariant_split": 0}),
        ("invariant_split", {"invariant_split": 100}),
    ],
)
def test_bad_buckets_are_named(named: str, changes: dict[str, int]) -> None:
    kv = KvLayer(*(torch.empty(1, 16, 2, 64, device="meta"),) * 2)
    arguments = {"num_seqs": 1, "max_query_len": 1, "num_heads": 4, "max_len": 64} | changes
    with pytest.raises(ValueError, match=f"^{named}: "):
        SplitPlan.for_bucket(kv=kv, chip=INTERPRETER, **arguments)
