"""flash_decoding in Triton's interpreter against the reference.

Every cache here holds NaN wherever a sequence has no key that its queries see: behind its last
token, before its window, and in the null block, to which unused entries of block tables point.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_data import assert_close, random_tensors

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip
from kvferry.kernels.flash_decoding import reference, wrapper
from kvferry.kernels.flash_decoding.configs import Config
from kvferry.kernels.flash_decoding.splits import SplitPlan
from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES, KvLayer, quantised

# Of the type that products are taken in and of the output, whichever is coarser. One rounding of
# each probability, by half a unit in the last place, and one of the output; the reference has
# neither. float32: sums of some hundred terms, and exponents that are rounded to 24 bits.
UNIT = {torch.float32: 2.0**-18, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SMALL = Config(tile=16)
FEW = dataclasses.replace(INTERPRETER, num_sms=2)
"""Four programs, so that short sequences too give a program several tiles and several items."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """``lengths``: context and number of queries of each sequence."""

    lengths: tuple[tuple[int, int], ...]
    max_query_len: int = 1
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    padding: int = 0
    magnitude: float = 1.0

    @property
    def max_len(self) -> int:
        return max((sum(pair) for pair in self.lengths), default=0)

    def first_key(self, context_len: int) -> int:
        return 0 if self.window is None else max(0, context_len - self.window + 1)


@dataclass(frozen=True, kw_only=True)
class Batch:
    shape: Shape
    q: torch.Tensor
    kv: KvLayer
    tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor

    def plan(self, config: Config | None = SMALL, chip: Chip = FEW) -> SplitPlan:
        shape = self.shape
        splits = SplitPlan.for_bucket(
            len(shape.lengths),
            shape.max_query_len,
            self.q.shape[1],
            self.kv,
            max(1, shape.max_len),
            chip,
            window=shape.window,
            config=config,
        )
        wrapper.plan_splits(self.context_lens, self.query_starts, splits)
        return splits

    def args(self, splits: SplitPlan) -> tuple[Any, ...]:
        return (self.q, self.kv, self.tables, self.context_lens, self.query_starts, splits)

    def options(self) -> dict[str, Any]:
        return {
            "scale": self.q.shape[2] ** -0.5,
            "window": self.shape.window,
            "softcap": self.shape.softcap,
        }


def make_batch(shape: Shape, seed: int) -> Batch:
    random = random_tensors(seed)
    block_size, num_seqs = shape.block_size, len(shape.lengths)
    num_blocks = -(-max(1, shape.max_len) // block_size)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_seqs * num_blocks, generator=generator).to(torch.int32)
    tables = 1 + order.view(num_seqs, num_blocks)
    used = torch.zeros(1 + num_seqs * num_blocks, block_size, dtype=torch.bool)
    for i_seq, (context_len, num_queries) in enumerate(shape.lengths):
        keys = range(shape.first_key(context_len), context_len + num_queries)
        for i_block in range(num_blocks):
            inside = [key % block_size for key in keys if key // block_size == i_block]
            if num_queries and inside:
                used[tables[i_seq, i_block], inside] = True
            else:
                tables[i_seq, i_block] = 0
    size = (len(used), block_size, shape.num_kv_heads, shape.head_dim)
    k, k_scale = _poisoned(random(*size), shape.dtype, ~used)
    v, v_scale = _poisoned(random(*size), shape.dtype, ~used)
    starts = torch.tensor([0, *(num for _, num in shape.lengths)]).cumsum(0).to(torch.int32)
    num_tokens = int(starts[-1]) + shape.padding
    q = random(num_tokens, shape.num_kv_heads * shape.group, shape.head_dim) * shape.magnitude
    q[int(starts[-1]) :] = math.nan
    return Batch(
        shape=shape,
        q=q.to(shape.q_dtype),
        kv=KvLayer(k, v, k_scale, v_scale),
        tables=tables,
        context_lens=torch.tensor([c for c, _ in shape.lengths], dtype=torch.int32),
        query_starts=starts,
    )


def _poisoned(
    x: torch.Tensor, dtype: torch.dtype, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As a cache keeps x, NaN where unused."""
    elements, scale = quantised(x, dtype)
    if dtype is torch.float8_e4m3fn:
        elements.view(torch.uint8)[unused] = 0x7F
    elif dtype is not torch.int8:
        elements[unused] = math.nan
    if scale is not None:
        scale[unused] = math.nan
    return elements, scale


def bounds(batch: Batch) -> dict[torch.dtype, float]:
    products = batch.kv.k.dtype if batch.kv.k.dtype in UNIT else torch.float16
    # Scores are of this order, a few times as large at most, and summed up in float32; what one is
    # wrong by is its weight's relative error.
    scores = 4 * batch.shape.magnitude * 2**-22
    return {batch.q.dtype: max(UNIT[products], UNIT[batch.q.dtype], scores)}


def check(batch: Batch, splits: SplitPlan) -> None:
    lse, expected_lse = (torch.empty(batch.q.shape[:2]) for _ in range(2))
    args, options = batch.args(splits), batch.options()
    out = wrapper.flash_decoding(*args, **options, lse=lse)
    expected = reference.flash_decoding(*args, **options, lse=expected_lse)
    assert_close(out, expected, bounds(batch))
    num_tokens = int(batch.query_starts[-1])
    assert not out[num_tokens:].any()
    assert (lse[num_tokens:] == -math.inf).all()
    if num_tokens:
        # Scores are sums of products that float16 and bf16 hold exactly, in another order.
        torch.testing.assert_close(
            lse[:num_tokens], expected_lse[:num_tokens], atol=1e-4, rtol=1e-5
        )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    max_query_len = draw(st.sampled_from([1, 2, 4, 5]))
    lengths = st.tuples(st.integers(0, 70), st.integers(0, max_query_len))
    dtype = draw(st.sampled_from(FLOAT_TYPES + QUANTISED_TYPES))
    return Shape(
        lengths=tuple(draw(st.lists(lengths, min_size=1, max_size=4))),
        max_query_len=max_query_len,
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 8)),
        head_dim=draw(st.sampled_from([64, 80])),
        block_size=draw(st.sampled_from([8, 16, 24, 32])),
        dtype=dtype,
        q_dtype=dtype
        if dtype in FLOAT_TYPES
        else draw(st.sampled_from([torch.bfloat16, torch.float16])),
        window=draw(st.none() | st.integers(1, 40)),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        padding=draw(st.integers(0, 2)),
        magnitude=draw(st.sampled_from([0.1, 1.0, 20.0])),
    )


# An example costs a second: to shrink a failure would cost minutes.
@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
def test_equals_the_reference(shape: Shape, seed: int) -> None:
    room = len(shape.lengths) * shape.max_query_len - sum(num for _, num in shape.lengths)
    batch = make_batch(dataclasses.replace(shape, padding=min(room, shape.padding)), seed)
    check(batch, batch.plan())


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.float8_e4m3fn),
        (80, torch.bfloat16),
        (96, torch.int8),
        (128, torch.bfloat16),
        (192, torch.float16),
        (256, torch.float8_e4m3fn),
    ],
)
def test_every_head_dim(seeded: int, head_dim: int, dtype: torch.dtype) -> None:
    """With the tiles that a chip would have."""
    q_dtype = dtype if dtype in FLOAT_TYPES else torch.bfloat16
    shape = Shape(lengths=((300, 1),), group=4, head_dim=head_dim, dtype=dtype, q_dtype=q_dtype)
    batch = make_batch(shape, seeded)
    check(batch, batch.plan(config=None, chip=dataclasses.replace(FEW, num_sms=1)))


@pytest.mark.parametrize("block_size", [8, 40, 64, 256])
def test_every_way_that_tiles_lie_in_blocks(seeded: int, block_size: int) -> None:
    shape = Shape(lengths=((130, 2), (0, 1)), max_query_len=2, block_size=block_size)
    batch = make_batch(shape, seeded)
    check(batch, batch.plan(config=Config(tile=32)))


def test_lengths_at_the_edges_of_tiles_and_splits(seeded: int) -> None:
    lengths = tuple((length - 1, 1) for length in (1, 15, 16, 17, 31, 32, 33, 64))
    batch = make_batch(Shape(lengths=lengths), seeded)
    check(batch, batch.plan())


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_windows_at_the_edges_of_tiles(seeded: int, window: int) -> None:
    """Smaller than a split, and than a draft."""
    lengths = ((47, 3), (48, 3), (3, 3), (0, 3))
    batch = make_batch(Shape(lengths=lengths, max_query_len=3, window=window), seeded)
    check(batch, batch.plan())


def test_more_rows_than_a_tile_has(seeded: int) -> None:
    shape = Shape(lengths=((20, 16), (5, 11)), max_query_len=16, group=5, dtype=torch.float16)
    batch = make_batch(dataclasses.replace(shape, q_dtype=torch.float16), seeded)
    splits = batch.plan()
    assert splits.rows_per_tile < shape.group * shape.max_query_len
    check(batch, splits)


def test_more_splits_than_the_merge_takes_at_once(seeded: int) -> None:
    """And the largest score comes last, so that what was merged before must be rescaled."""
    batch = make_batch(Shape(lengths=((639, 1),)), seeded)
    largest = batch.q[0, 0] * (5.0 * 8.0 / batch.q.square().sum())
    batch.kv.k[batch.tables[0, -1], -1, 0] = largest
    splits = batch.plan(chip=dataclasses.replace(INTERPRETER, num_sms=20))
    assert int(splits.seq_items[1]) == 40 > wrapper.MERGED_AT_ONCE
    check(batch, splits)


def test_fp8_on_a_chip_without_the_instruction(seeded: int) -> None:
    shape = Shape(lengths=((37, 2),), max_query_len=2, dtype=torch.float8_e4m3fn)
    batch = make_batch(shape, seeded)
    splits, out = batch.plan(), torch.empty_like(batch.q)
    args = batch.args(splits)
    for launch in wrapper.flash_decoding_launches(*args, CHIPS["A100"], out, **batch.options()):
        launch.run()
    assert_close(out, reference.flash_decoding(*args, **batch.options()), bounds(batch))


def test_scales_that_float16_does_not_hold(seeded: int) -> None:
    batch = make_batch(Shape(lengths=((37, 1),), dtype=torch.int8, q_dtype=torch.bfloat16), seeded)
    assert batch.kv.v_scale is not None
    batch.kv.v_scale.mul_(1e7)
    check(batch, batch.plan())
    batch.kv.v_scale.mul_(1e-16)
    check(batch, batch.plan())


@pytest.mark.parametrize("padding", [0, 3])
def test_a_batch_of_padding_is_zero(padding: int) -> None:
    shape = Shape(lengths=((0, 0), (50, 0), (7, 0)), padding=padding)
    batch = make_batch(shape, 1)
    check(batch, batch.plan())


def test_heads_inside_a_wider_tensor(seeded: int) -> None:
    """q as a part of one product for q, k and v, out as a part of a larger buffer."""
    batch = make_batch(Shape(lengths=((20, 1), (30, 1)), group=2), seeded)
    wide = torch.full((2, 6, 64), math.nan)
    wide[:, 1:3] = batch.q
    inside, out = dataclasses.replace(batch, q=wide[:, 1:3]), torch.empty(2, 5, 64)
    splits = batch.plan()
    result = wrapper.flash_decoding(*inside.args(splits), **batch.options(), out=out[:, 2:4])
    assert result.data_ptr() == out[:, 2:4].data_ptr()
    expected = reference.flash_decoding(*batch.args(splits), **batch.options())
    assert_close(result, expected, bounds(batch))
    assert out[:, :2].isnan().all()
    assert out[:, 4:].isnan().all()


def test_launches_run_again_after_lengths_changed_in_place(seeded: int) -> None:
    """As a captured graph does: the same launches, new contents."""
    batch = make_batch(Shape(lengths=((70, 2),) * 3, max_query_len=2, group=2), seeded)
    splits, out = batch.plan(), torch.empty_like(batch.q)
    args, options = batch.args(splits), batch.options()
    launches = [
        wrapper.plan_splits_launch(batch.context_lens, batch.query_starts, splits),
        *wrapper.flash_decoding_launches(*args, INTERPRETER, out, **options),
    ]
    for context_lens, query_starts in (
        ([5, 70, 17], [0, 1, 3, 5]),
        ([0, 9, 71], [0, 0, 0, 1]),
        ([1, 2, 3], [0, 0, 0, 0]),
        ([70, 0, 33], [0, 2, 4, 6]),
    ):
        batch.context_lens.copy_(torch.tensor(context_lens))
        batch.query_starts.copy_(torch.tensor(query_starts))
        out.fill_(math.nan)
        for launch in launches:
            launch.run()
        assert_close(out, reference.flash_decoding(*args, **options), bounds(batch))


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("q", {"q": torch.empty(2, 2, 32)}),
        ("q", {"q": torch.empty(2, 2, 64, dtype=torch.float64)}),
        ("q", {"q": torch.empty(2, 2, 64, dtype=torch.float16)}),
        ("q", {"q": torch.empty(5, 2, 64)}),
        ("splits", {"q": torch.empty(2, 4, 64)}),
        ("kv.v", {"kv": KvLayer(torch.empty(2, 16, 1, 64), torch.empty(2, 8, 1, 64))}),
        ("block_tables", {"block_tables": torch.zeros(1, 2, dtype=torch.int32)}),
        ("block_tables", {"block_tables": torch.zeros(2, 2, dtype=torch.int64)}),
        ("context_lens", {"context_lens": torch.zeros(3, dtype=torch.int32)}),
        ("query_starts", {"query_starts": torch.zeros(3, dtype=torch.int64)}),
        ("window", {"window": 8}),
        ("out", {"out": torch.empty(2, 2, 64, dtype=torch.float16)}),
        ("lse", {"lse": torch.empty(2, 1)}),
    ],
)
def test_bad_arguments_are_named(named: str, changes: dict[str, Any]) -> None:
    batch = make_batch(Shape(lengths=((3, 1), (4, 1)), group=2), 1)
    names = ("q", "kv", "block_tables", "context_lens", "query_starts", "splits")
    arguments = dict(zip(names, batch.args(batch.plan()), strict=True)) | batch.options()
    with pytest.raises(ValueError, match=rf"^{named}: "):
        wrapper.flash_decoding(**arguments | changes)
