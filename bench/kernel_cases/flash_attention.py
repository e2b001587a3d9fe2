"""Prefill attention: long causal prompts, mixed batches with cached context, all head dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention import reference
from kvferry.kernels.flash_attention.configs import config_for
from kvferry.kernels.flash_attention.plan import PrefillPlan
from kvferry.kernels.flash_attention.wrapper import flash_attention_launch, tiles_on
from kvferry.kernels.kv_layer import KvLayer, quantised

MIXED = (
    (2048, 6144), (1, 4000), (512, 0), (96, 8000), (1024, 1024), (33, 0), (700, 300), (2048, 0),
    (16, 2000), (256, 256), (1, 0), (640, 5000), (128, 128), (1500, 0), (64, 7000), (300, 900),
)  # fmt: skip
"""(queries, cached context) of 16 sequences."""
TYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
TOLERANCE = 2**-7
"""Of bf16: one rounding of the weights (2^-9 relative) and one of the output, and another order of
sums. The scales of a quantised cache add another rounding of float32 and none of bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One ragged batch over one layer."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, cached context) per sequence."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cache: str
    block_size: int
    window: int | None = None
    softcap: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.lengths)

    @property
    def flops(self) -> int:
        """Of both products over the pairs of query and key that are visible."""
        pairs = 0
        for queries, context in self.lengths:
            ends = range(context + 1, context + queries + 1)
            pairs += sum(min(end, self.window or end) for end in ends)
        return 4 * self.head_dim * self.num_heads * pairs

    @property
    def nbytes(self) -> int:
        """q and out once, and K and V of every token once, with scales."""
        keys = sum(map(sum, self.lengths))
        element = TYPES[self.cache].itemsize * self.head_dim + (self.cache != "bf16") * 4
        rows = 2 * 2 * self.num_tokens * self.num_heads * self.head_dim
        return rows + 2 * keys * self.num_kv_heads * element


def cases() -> Iterator[Case]:
    """Llama-3-8B's heads at 8k, other sizes, and every tuned configuration."""
    causal = ((8192, 0),)
    # The larger blocks are where a tile of keys is one piece; 16 is the default of the cache.
    for block_size in (128, 16):
        for cache in TYPES:
            is_goal = block_size == 128 and cache == "bf16"
            yield _case(
                f"causal 8k, {cache}, blocks of {block_size}",
                _Shape(
                    lengths=causal,
                    num_heads=32,
                    num_kv_heads=8,
                    head_dim=128,
                    cache=cache,
                    block_size=block_size,
                ),
                goal=0.70 if is_goal else None,
                peer_goal=1.0 if is_goal else None,
                not_slower_than=(
                    None if cache == "bf16" else f"causal 8k, bf16, blocks of {block_size}"
                ),
                in_ci=True,
            )


def _case(name: str, shape: _Shape, **goals: Any) -> Case:
    return Case(
        kernel="flash_attention",
        name=name,
        make=partial(_work, shape),
        nbytes=shape.nbytes,
        flops=shape.flops,
        tolerance=TOLERANCE,
        limit=Limit.MATMUL,
        matrix=True,
        warp_group=True,
        **goals,
    )


def _work(shape: _Shape, device: torch.device, chip: Chip) -> Work:
    dtype = TYPES[shape.cache]
    blocks_of = [-(-sum(lengths) // shape.block_size) for lengths in shape.lengths]
    k, v = (
        torch.randn(
            sum(blocks_of),
            shape.block_size,
            shape.num_kv_heads,
            shape.head_dim,
            device=device,
            dtype=torch.bfloat16,
        )
        for _ in range(2)
    )
    (k_cache, k_scale), (v_cache, v_scale) = (
        (x, None) if dtype is torch.bfloat16 else quantised(x, dtype) for x in (k, v)
    )
    kv = KvLayer(k_cache, v_cache, k_scale, v_scale)
    order = torch.randperm(sum(blocks_of), device=device, dtype=torch.int32)
    tables = torch.zeros(len(blocks_of), max(blocks_of), device=device, dtype=torch.int32)
    for seq, blocks in enumerate(order.split(blocks_of)):
        tables[seq, : len(blocks)] = blocks
    queries, contexts = zip(*shape.lengths, strict=True)
    starts = torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32)
    context_lens = torch.tensor(contexts, device=device, dtype=torch.int32)
    q = torch.randn(
        shape.num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16
    )
    out = torch.empty_like(q)
    config = config_for(chip, kv, q.dtype)
    plan = PrefillPlan.of(queries, contexts, window=shape.window, rows=config.rows)
    options = {
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "softcap": shape.softcap,
    }
    launch = flash_attention_launch(
        q,
        kv,
        tables,
        starts,
        context_lens,
        tiles_on(plan, device),
        out,
        chip,
        config=config,
        **options,
    )
    return Work(
        launches=[launch],
        outputs=[out],
        expected=lambda: [
            reference.flash_attention(q, kv, tables, starts, context_lens, plan, **options)
        ],
        peers=_peers(q, k, v) if len(shape.lengths) == 1 and not contexts[0] else {},
    )


def _peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """PyTorch's backends on dense copies in the layout that they like best: [1, heads, T, D], each
    query head with K and V of its own. (The values are those of another order of blocks.)
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // k.shape[2]

    def dense(x: torch.Tensor, repeats: int) -> torch.Tensor:
        return x.repeat_interleave(repeats, 1).transpose(0, 1)[None].contiguous()

    query = dense(q, 1)
    keys, values = (dense(x.flatten(0, 1)[:num_tokens], group) for x in (k, v))

    def attend(backend: SDPBackend) -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, is_causal=True)

    return {
        "sdpa flash": partial(attend, SDPBackend.FLASH_ATTENTION),
        "sdpa efficient": partial(attend, SDPBackend.EFFICIENT_ATTENTION),
        "sdpa cudnn": partial(attend, SDPBackend.CUDNN_ATTENTION),
    }
