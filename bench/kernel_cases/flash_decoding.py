"""Decoding over the paged cache: Llama-3-8B's heads at the issue's sizes, verification of drafts,
mixed lengths, windows, and every head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvferry.bench.kernel_cases.case import CACHE_TYPES, Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_decoding import reference, wrapper
from kvferry.kernels.flash_decoding.configs import Config, candidates
from kvferry.kernels.flash_decoding.splits import INVARIANT_SPLIT, SplitPlan
from kvferry.kernels.kv_layer import KvLayer, quantised

TOLERANCE = 2**-7
"""Of bf16: one rounding of the weights (2^-9 relative) and one of the output, and another order of
sums. Quantised caches are multiplied in float16, which is finer."""
GOALS = {1: (32768, 0.80), 16: (8192, 0.90), 64: (2048, 0.90), 256: (2048, 0.90)}
"""Batch -> tokens of each sequence, and the share of copy bandwidth to reach."""
MIXED = tuple(128 * 2 ** (i % 8) - i for i in range(64))
"""Short and long neighbours, 64 tokens to 16k."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One decoding step over one layer."""

    contexts: tuple[int, ...]
    """Cached tokens of each sequence, before those of the step."""
    queries: int = 1
    """Tokens of the step per sequence."""
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bf16"
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    invariant_split: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.contexts) * self.queries

    @property
    def num_keys(self) -> int:
        """That some query sees."""
        reach = None if self.window is None else self.window - 1
        seen = (c if reach is None else min(c, reach) for c in self.contexts)
        return sum(seen) + self.num_tokens

    @property
    def nbytes(self) -> int:
        """q and out once, and the visible K and V once, with scales."""
        element = CACHE_TYPES[self.cache].itemsize * self.head_dim + (self.cache != "bf16") * 4
        rows = 2 * 2 * self.num_tokens * self.num_heads * self.head_dim
        return rows + 2 * self.num_keys * self.num_kv_heads * element

    @property
    def flops(self) -> int:
        return 4 * self.head_dim * self.num_heads * self.queries * self.num_keys


def cases() -> Iterator[Case]:
    """The issue's goals first; then what else a decode worker meets."""
    for batch, (length, goal) in GOALS.items():
        for cache in CACHE_TYPES:
            name = f"batch {batch} x {length}"
            yield _case(
                f"{name}, {cache}",
                _Shape(contexts=(length - 1,) * batch, cache=cache),
                goal=goal if cache == "bf16" else None,
                not_slower_than=None if cache == "bf16" else f"{name}, bf16",
                in_ci=batch == 16,
            )
    yield _case("batch 64 x 2048, bf16, blocks of 64", _equal(64, block_size=64))
    for queries in (4, 16):
        for cache in ("bf16", "fp8"):
            yield _case(
                f"batch 64 x 2048, drafts of {queries}, {cache}",
                _equal(64, queries=queries, cache=cache),
                warp_group=queries == 16 and cache == "bf16",
                # On sm_100 alone: 24 bytes beyond 255 registers.
                spills_allowed=24 if (queries, cache) == (4, "fp8") else 0,
                in_ci=cache == "bf16",
            )
    yield _case("batch 64, 64 to 16k mixed, bf16", _Shape(contexts=MIXED))
    yield _case("batch 64 x 2048, bf16, window 512", _equal(64, window=512))
    yield _case(
        "batch 64 x 2048, bf16, batch-invariant", _equal(64, invariant_split=INVARIANT_SPLIT)
    )
    yield _case(
        "batch 64 x 2048, 9/3 heads of 64, bf16",
        _equal(64, num_heads=9, num_kv_heads=3, head_dim=64),
        in_ci=True,
    )
    for head_dim in (64, 80, 96, 192, 256):
        for cache in CACHE_TYPES:
            yield _case(
                f"batch 16 x 2048, heads of {head_dim}, {cache}",
                _equal(16, head_dim=head_dim, cache=cache),
                # On sm_80 alone, where ptxas stops at 128 registers of its own accord.
                spills_allowed=8 if head_dim == 64 and cache != "bf16" else 0,
            )
    yield _case(
        "batch 16 x 2048, 8/4 heads of 256, bf16, window 1024, soft-cap",
        _equal(16, num_heads=8, num_kv_heads=4, head_dim=256, window=1024, softcap=50.0),
    )
    yield Case(
        kernel="flash_decoding",
        name="plan of batch 256",
        make=partial(_plan_work, _equal(256)),
        nbytes=4 * (256 + 257 + 257 + 34 + 4 * (256 + 33)),
        flops=0,
        tolerance=0.0,
        limit=Limit.COPY,
        in_ci=True,
    )


def _equal(batch: int, **changes: Any) -> _Shape:
    queries = changes.get("queries", 1)
    return _Shape(contexts=(2048 - queries,) * batch, **changes)


def _case(name: str, shape: _Shape, **goals: Any) -> Case:
    return Case(
        kernel="flash_decoding",
        name=name,
        make=partial(_work, shape, None),
        nbytes=shape.nbytes,
        flops=shape.flops,
        tolerance=TOLERANCE,
        limit=Limit.COPY,
        matrix=True,
        candidates=partial(_candidates, shape),
        **goals,
    )


def _candidates(shape: _Shape, chip: Chip) -> Mapping[str, Callable[[torch.device, Chip], Work]]:
    """Those that the chip has the shared memory for, by what the pipeline keeps there."""
    itemsize = CACHE_TYPES[shape.cache].itemsize
    return {
        str(config): partial(_work, shape, config)
        for config in candidates(itemsize, shape.head_dim)
        if config.shared_nbytes(itemsize, shape.head_dim) <= chip.shared_limit
    }


def _work(shape: _Shape, config: Config | None, device: torch.device, chip: Chip) -> Work:
    kv, tables = _cache(shape, device)
    context_lens, query_starts = _lengths(shape, device)
    splits = _plan(shape, config, kv, chip)
    if device.type != "meta":
        wrapper.plan_splits(context_lens, query_starts, splits)
    q = torch.randn(
        shape.num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16
    )
    out = torch.empty_like(q)
    args = (q, kv, tables, context_lens, query_starts, splits)
    options = {
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "softcap": shape.softcap,
    }
    return Work(
        launches=wrapper.flash_decoding_launches(*args, chip, out, **options),
        outputs=[out],
        expected=lambda: [reference.flash_decoding(*args, **options)],
        peers=_peers(shape, q, kv) if device.type == "cuda" else {},
    )


def _cache(shape: _Shape, device: torch.device) -> tuple[KvLayer, torch.Tensor]:
    """Every sequence's blocks scattered over the cache."""
    per_seq = -(-(max(shape.contexts) + shape.queries) // shape.block_size)
    num_blocks = len(shape.contexts) * per_seq
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    (k, k_scale), (v, v_scale) = (
        quantised(torch.randn(size, device=device, dtype=torch.bfloat16), CACHE_TYPES[shape.cache])
        for _ in range(2)
    )
    tables = torch.randperm(num_blocks, device=device, dtype=torch.int32)
    return KvLayer(k, v, k_scale, v_scale), tables.view(len(shape.contexts), per_seq)


def _lengths(shape: _Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.arange(len(shape.contexts) + 1, device=device, dtype=torch.int32)
    context_lens = torch.tensor(shape.contexts, device=device, dtype=torch.int32)
    return context_lens, starts * shape.queries


def _plan(shape: _Shape, config: Config | None, kv: KvLayer, chip: Chip) -> SplitPlan:
    return SplitPlan.for_bucket(
        len(shape.contexts),
        shape.queries,
        shape.num_heads,
        kv,
        max(shape.contexts) + shape.queries,
        chip,
        window=shape.window,
        invariant_split=shape.invariant_split,
        config=config,
    )


def _plan_work(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    size = (1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.empty(size, device=device, dtype=torch.bfloat16) for _ in range(2))
    context_lens, query_starts = _lengths(shape, device)
    splits, expected = (_plan(shape, None, KvLayer(k, v), chip) for _ in range(2))

    def plan() -> list[torch.Tensor]:
        reference.plan_splits(context_lens, query_starts, expected)
        return [expected.seq_items, expected.program_items]

    return Work(
        launches=[wrapper.plan_splits_launch(context_lens, query_starts, splits)],
        outputs=[splits.seq_items, splits.program_items],
        expected=plan,
    )


def _peers(shape: _Shape, q: torch.Tensor, kv: KvLayer) -> dict[str, Callable[[], object]]:
    """PyTorch over a dense bf16 cache of equal lengths, [S, heads, tokens, D], with no page table.
    (The values are those of another order of blocks; without a mask, as one query needs none.)
    """
    lengths = {context + shape.queries for context in shape.contexts}
    if kv.is_quantised or shape.window or shape.softcap or shape.queries > 1 or len(lengths) > 1:
        return {}
    num_seqs = len(shape.contexts)
    keys, values = (
        x.view(num_seqs, -1, *x.shape[2:])[:, : max(lengths)].transpose(1, 2) for x in (kv.k, kv.v)
    )
    query = q.view(num_seqs, 1, shape.num_heads, shape.head_dim).transpose(1, 2)
    return {"sdpa": lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)}
