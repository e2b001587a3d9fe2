"""Attention of the CPU over the paged cache: right, and the same bits however a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels.cpu.attention import (
    SPAN,
    TYPES,
    StepBatch,
    attend,
    cache_of,
    cut_into_spans,
    is_read,
    rotate_and_keep,
)
from kvferry.kernels.cpu.library import CpuOps, Lanes
from kvferry.kernels.kv_layer import KvLayer, dequantised, quantised
from kvferry.kernels.rope_kv_write.reference import rope_kv_write


@dataclass(slots=True)
class Step:
    """Sequences of (context, new tokens) with their queries, blocks in random order."""

    lengths: list[tuple[int, int]]
    kv: KvLayer
    q: torch.Tensor
    tables: np.ndarray

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *(new for _, new in self.lengths)], dtype=np.int64)

    @property
    def contexts(self) -> np.ndarray:
        return np.array([context for context, _ in self.lengths], np.int32)


def random_step(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 3,
    group: int = 3,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """What no sequence owns is NaN in caches of floats."""
    counts = [-(-sum(length) // block_size) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3).int().numpy()
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for seq, count in enumerate(counts):
        tables[seq, :count], blocks = blocks[:count], blocks[count:]
    shape = (sum(counts) + 3, block_size, heads, dim)
    k, v = (quantised(torch.randn(shape), dtype) for _ in range(2))
    if dtype.is_floating_point and dtype is not torch.float8_e4m3fn:
        for seq, length in enumerate(map(sum, lengths)):
            for token in range(length, counts[seq] * block_size):
                for cache in (k[0], v[0]):
                    cache[tables[seq, token // block_size], token % block_size] = torch.nan
    kv = KvLayer(k[0], v[0], k[1], v[1])
    new = sum(count for _, count in lengths)
    return Step(lengths, kv, torch.randn(new, heads * group, dim), tables)


def ours(cpu: CpuOps, step: Step, workers: int = 1) -> torch.Tensor:
    group = step.q.shape[1] // step.kv.num_kv_heads
    slots = torch.full((len(step.q),), -1)
    batch = StepBatch.of(step.starts, step.contexts, step.tables, slots, step.kv, group, workers)
    return attend(cpu, step.q, cache_of(step.kv), batch)


def expected(step: Step) -> torch.Tensor:
    """In float64, sequence by sequence."""
    out = []
    size, group = step.kv.block_size, step.q.shape[1] // step.kv.num_kv_heads
    for seq, (context, new) in enumerate(step.lengths):
        tokens = torch.arange(context + new)
        at = torch.from_numpy(step.tables[seq]).long()[tokens // size], tokens % size
        scales = step.kv.k_scale, step.kv.v_scale
        k, v = (
            dequantised(cache[at], None if scale is None else scale[at]).double()
            for cache, scale in zip((step.kv.k, step.kv.v), scales, strict=True)
        )
        q = step.q[step.starts[seq] : step.starts[seq + 1]].double()
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        hidden = tokens > torch.arange(context, context + new)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(out)


LENGTHS = [(0, 1), (63, 1), (64, 1), (700, 1), (5, 9), (0, 130), (61, 70), (128, 1)]


@pytest.mark.parametrize("dim", [16, 64, 80, 256])
@pytest.mark.parametrize(("heads", "group"), [(3, 3), (1, 1), (2, 8)])
def test_heads_and_lengths(cpu: CpuOps, dim: int, heads: int, group: int) -> None:
    step = random_step(LENGTHS, heads=heads, group=group, dim=dim, block_size=7)
    assert torch.allclose(ours(cpu, step).double(), expected(step), atol=5e-6)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str
)
def test_types_of_caches(cpu: CpuOps, dtype: torch.dtype) -> None:
    step = random_step(LENGTHS, dtype=dtype, dim=48)
    assert torch.allclose(ours(cpu, step).double(), expected(step), atol=5e-6)


def test_both_kinds_of_cpu_and_any_threads_give_the_same_bits(
    cpu: CpuOps, cpu_library: object
) -> None:
    step = random_step(LENGTHS)
    other = CpuOps(cpu_library, Lanes.AVX2)  # type: ignore[arg-type]
    assert torch.equal(ours(cpu, step, 2), ours(other, step, 1))


def test_a_query_alone_equals_itself_in_any_batch_and_chunk(cpu: CpuOps) -> None:
    step = random_step([(40, 150), (3, 1), (90, 1)])
    whole = ours(cpu, step)
    for first, new in ((0, 1), (23, 1), (24, 17), (100, 50), (149, 1)):
        part = Step([(40 + first, new)], step.kv, step.q[first : first + new], step.tables[:1])
        assert torch.equal(ours(cpu, part), whole[first : first + new])
    last = Step([(90, 1)], step.kv, step.q[-1:].contiguous(), step.tables[2:])
    assert torch.equal(ours(cpu, last), whole[-1:])


def test_a_block_outside_the_cache_is_refused(cpu: CpuOps) -> None:
    step = random_step([(20, 1)])
    for wrong in (-1, len(step.kv.k)):
        step.tables[0, 1] = wrong
        with pytest.raises(IndexError, match="outside the cache"):
            ours(cpu, step)
    step.tables = np.pad(step.tables[:, :1], ((0, 0), (0, 3)), constant_values=-7)
    step.lengths = [(10, 1)]
    assert ours(cpu, step).isfinite().all()


@given(
    lengths=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 300)), min_size=1, max_size=6),
    heads=st.integers(1, 4),
    group=st.sampled_from([1, 3, 8, 300]),
    workers=st.integers(1, 4),
)
def test_spans_cover_every_query_of_every_head_once(
    lengths: list[tuple[int, int]], heads: int, group: int, workers: int
) -> None:
    starts = np.cumsum([0, *(new for _, new in lengths)], dtype=np.int64)
    contexts = np.array([context for context, _ in lengths], np.int32)
    spans = cut_into_spans(starts, contexts, heads, group, workers)
    assert spans.dtype == SPAN
    assert spans.flags.c_contiguous
    seen = np.zeros((int(starts[-1]), heads), int)
    for seq, query, count, position, head, num_heads in spans.tolist():
        seen[query : query + count, head : head + num_heads] += 1
        assert starts[seq] <= query
        assert query + count <= starts[seq + 1]
        assert position == contexts[seq] + query - starts[seq]
    assert (seen == 1).all()


def shares_of(lengths: list[tuple[int, int]], workers: int) -> list[int]:
    """Keys times heads in each worker's share of the spans."""
    starts = np.cumsum([0, *(new for _, new in lengths)], dtype=np.int64)
    contexts = np.array([context for context, _ in lengths], np.int32)
    spans = cut_into_spans(starts, contexts, 3, 3, workers)
    work = (spans["position"] + spans["num_queries"]) * spans["num_heads"]
    bounds = [len(spans) * i // workers for i in range(workers + 1)]
    return [int(work[i:j].sum()) for i, j in pairwise(bounds)]


def test_each_worker_begins_with_a_share_of_about_the_same_work() -> None:
    lengths = [(context, 1) for context in range(100, 4000, 100)]
    for workers in (2, 3):
        shares = shares_of(lengths, workers)
        assert max(shares) < 1.2 * min(shares)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("half", "normed"), [(32, False), (24, True)])
def test_rotation_and_write(
    cpu: CpuOps, dtype: torch.dtype, half: int, normed: bool, two_threads: None
) -> None:
    q, k, v = (torch.randn(200, heads, 64) for heads in (6, 2, 2))
    v[7] = 0.0
    v[8, 1, 3] = torch.nan
    cos, sin = torch.randn(2, 200, half)
    norms = (torch.randn(64), torch.randn(64), 1e-5) if normed else None
    slots = torch.randperm(320)[:200]
    slots[5] = -1
    caches = [random_step([(300, 1)], heads=2, dtype=dtype).kv for _ in range(2)]
    for ours, other in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        ours.copy_(other)
    if caches[0].k_scale is not None:
        for cache in caches:
            cache.k_scale.zero_()
            cache.v_scale.zero_()
    batch = StepBatch.of(
        np.arange(201),
        np.zeros(200, np.int32),
        np.zeros((200, 1), np.int32),
        slots,
        caches[0],
        3,
        2,
    )
    batch.rotate_by(cos, sin)
    rotated = rotate_and_keep(cpu, (q, k, v), norms, cache_of(caches[0]), batch)
    weights = norms or (None, None, 0.0)
    reference = rope_kv_write(q, k, v, cos, sin, slots, caches[1], *weights)
    assert torch.allclose(rotated, reference, rtol=1e-5, atol=1e-5)
    # Values are not computed with: they are the same bits, whatever becomes of a NaN.
    at = slots[slots >= 0]
    assert same(caches[0].v, caches[1].v)
    if caches[0].v_scale is not None:
        assert same(caches[0].v_scale, caches[1].v_scale)
    wanted, found = (
        dequantised(cache.k, cache.k_scale).flatten(0, 1)[at] for cache in (caches[1], caches[0])
    )
    last_place = ROUNDINGS[dtype] * wanted.abs()
    if dtype is torch.int8:
        last_place = wanted.abs().amax(-1, keepdim=True) / 127
    assert ((found - wanted).abs() <= 1.01 * last_place + 1e-4).all()


ROUNDINGS = {
    torch.float32: 2**-18,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.int8: 0.0,
    torch.float8_e4m3fn: 2**-3,
}
"""The last place of an element, of it: where another order of a sum may round it otherwise."""


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for which NaN a NaN is."""
    a, b = a.to(torch.float32), b.to(torch.float32)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def test_a_slot_outside_the_cache_is_refused() -> None:
    kv = KvLayer(*torch.zeros(2, 4, 16, 2, 64))
    one, zero = np.arange(2), np.zeros(1, np.int32)
    with pytest.raises(IndexError, match="slots"):
        StepBatch.of(one, zero, zero[None], torch.tensor([64]), kv, 3, 1)


def test_which_caches_are_written_and_read() -> None:
    assert is_read(KvLayer(*torch.zeros(2, 4, 16, 2, 64)))
    assert is_read(KvLayer(*torch.zeros(2, 4, 16, 2, 64, dtype=torch.float16)))
    assert not is_read(KvLayer(*torch.zeros(2, 4, 16, 2, 40)))
    assert not is_read(KvLayer(*torch.zeros(2, 4, 16, 2, 64, dtype=torch.float64)))
    assert is_read(KvLayer(*torch.zeros(2, 4, 16, 3, 64)[:, :, :, 1:]))
