"""Prefill attention: long causal prompts, mixed batches with cached context, all head dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvferry.bench.kernel_cases.case import CACHE_TYPES, Case, Limit, Work
from kvferry.kernels.chips import Chip
from kvferry.kernels.flash_attention import reference
from kvferry.kernels.flash_attention.configs import Config, candidates, config_for
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.flash_attention.unpack import unpack_launch
from kvferry.kernels.flash_attention.workspace import BLOCK_TOKENS, StepWorkspace, Workspace
from kvferry.kernels.flash_attention.wrapper import flash_attention_launch
from kvferry.kernels.kv_layer import HEAD_DIMS, KvLayer, quantised

MIXED = (
    (2048, 6144), (1, 4000), (512, 0), (96, 8000), (1024, 1024), (33, 0), (700, 300), (2048, 0),
    (16, 2000), (256, 256), (1, 0), (640, 5000), (128, 128), (1500, 0), (64, 7000), (300, 900),
)  # fmt: skip
"""(queries, cached context) of 16 sequences."""
GOAL = 0.70
"""Share of the measured matrix-product peak."""
SPILLS_OF_WIDE_HEADS = 384
"""Bytes per thread: 128 rows x 256 columns of output alone take 128 of its 255 registers."""
TOLERANCE = 2**-7
"""Of bf16: one rounding of the weights (2^-9 relative) and one of the output, and another order of
sums. A workspace adds one of each key and value, which the sums average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """One ragged batch over one layer."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, cached context) per sequence."""
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    cache: str = "bf16"
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    unpacked: bool = False
    """Whether keys and values are brought into a workspace before, as the engine does it where the
    cache is quantised."""

    @property
    def num_tokens(self) -> int:
        return sum(queries for queries, _ in self.lengths)

    @property
    def blocks_of(self) -> list[int]:
        return [-(-sum(lengths) // self.block_size) for lengths in self.lengths]

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_of)

    @property
    def is_plain(self) -> bool:
        """Whether scaled_dot_product_attention computes the same on dense tensors."""
        return (
            len(self.lengths) == 1 and not self.lengths[0][1] and not (self.window or self.softcap)
        )

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
        element = CACHE_TYPES[self.cache].itemsize * self.head_dim + (self.cache != "bf16") * 4
        rows = 2 * 2 * self.num_tokens * self.num_heads * self.head_dim
        return rows + 2 * keys * self.num_kv_heads * element


def cases() -> Iterator[Case]:
    """Llama-3-8B's heads at 8k, mixed lengths, other head dims, and every tuned configuration."""
    # In blocks of 128 a tile of keys is one piece; 16 is the cache's default.
    for block_size in (128, 16):
        beside = f"causal 8k, bf16, blocks of {block_size}"
        for cache in CACHE_TYPES:
            name = f"causal 8k, {cache}, blocks of {block_size}"
            shape = _Shape(lengths=((8192, 0),), cache=cache, block_size=block_size)
            if name == beside:
                yield _case(name, shape, goal=GOAL, peer_goal=1.0, in_ci=True)
            else:
                in_ci = cache == "fp8"
                unpacked = replace(shape, unpacked=True)
                yield _case(name, unpacked, not_slower_than=beside, in_ci=in_ci)
                yield _case(f"{name}, in place", shape, in_ci=in_ci)
    for cache in CACHE_TYPES:
        name, shape = f"16 mixed prompts, {cache}", _Shape(lengths=MIXED, cache=cache)
        yield _case(name, replace(shape, unpacked=cache != "bf16"))
        if cache != "bf16":
            yield _case(f"{name}, in place", shape)
    # Whether a float cache in short blocks had better be copied into long ones.
    shape = _Shape(lengths=((8192, 0),), unpacked=True)
    yield _case("causal 8k, bf16, blocks of 16, copied", shape)
    # Three loops instead of two are a few registers too many for sm_80's 64 keys alone.
    yield _case(
        "window 1024, 8k, bf16", _Shape(lengths=((8192, 0),), window=1024), spills_allowed=64
    )
    yield _case(
        "window 4096, cap 50, D 256, 8k, bf16",
        _Shape(
            lengths=((8192, 0),),
            num_heads=16,
            head_dim=256,
            block_size=128,
            window=4096,
            softcap=50.0,
        ),
    )
    for head_dim in (64, 256):
        yield _case(
            f"causal 8k, D {head_dim}, bf16",
            _Shape(
                lengths=((8192, 0),),
                num_heads=4096 // head_dim,
                head_dim=head_dim,
                block_size=128,
            ),
        )
    for head_dim in HEAD_DIMS:
        for cache, block_size in (("bf16", 128), ("bf16", 16), ("fp8", 16), ("int8", 128)):
            yield _case(
                f"1k, D {head_dim}, {cache}, blocks of {block_size}",
                _Shape(lengths=((1024, 0),), head_dim=head_dim, cache=cache, block_size=block_size),
                in_ci=head_dim == 64 and (cache == "fp8" or block_size == 128) and cache != "int8",
            )


def _case(name: str, shape: _Shape, **goals: Any) -> Case:
    return Case(
        kernel="flash_attention",
        name=name,
        make=partial(_work, shape, None),
        candidates=partial(_candidates, shape) if shape.num_tokens >= 8192 else None,
        nbytes=shape.nbytes,
        flops=shape.flops,
        tolerance=TOLERANCE,
        limit=Limit.MATMUL,
        matrix=True,
        warp_group=True,
        **{"spills_allowed": SPILLS_OF_WIDE_HEADS if shape.head_dim > 128 else 0, **goals},
    )


def _candidates(shape: _Shape, chip: Chip) -> dict[str, Callable[[torch.device, Chip], Work]]:
    meta = torch.device("meta")
    workspace = _workspace(shape, meta)
    read = _cache(shape, meta) if workspace is None else workspace.layer
    tried = candidates(chip, read, torch.bfloat16)
    return {
        f"{c.rows} rows, {c.keys} keys, {c.buffers} buffers, {c.num_warps} warps": partial(
            _work, shape, c
        )
        for c in tried
    }


def _cache(shape: _Shape, device: torch.device) -> KvLayer:
    size = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(*size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if shape.cache == "bf16":
        return KvLayer(k, v)
    (k, k_scale), (v, v_scale) = (quantised(x, CACHE_TYPES[shape.cache]) for x in (k, v))
    return KvLayer(k, v, k_scale, v_scale)


def _tables(shape: _Shape, device: torch.device) -> torch.Tensor:
    """Blocks in random order."""
    tables = torch.zeros(len(shape.lengths), max(shape.blocks_of), dtype=torch.int32)
    order = torch.randperm(shape.num_blocks, dtype=torch.int32)
    for seq, blocks in enumerate(order.split(shape.blocks_of)):
        tables[seq, : len(blocks)] = blocks
    return tables.to(device)


def _workspace(shape: _Shape, device: torch.device) -> StepWorkspace | None:
    if not shape.unpacked:
        return None
    workspace = Workspace.allocate(
        sum(BLOCK_TOKENS * -(-sum(lengths) // BLOCK_TOKENS) for lengths in shape.lengths),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
        device=device,
    )
    return workspace.for_step(*zip(*shape.lengths, strict=True), window=shape.window)


def _work(shape: _Shape, config: Config | None, device: torch.device, chip: Chip) -> Work:
    kv, tables = _cache(shape, device), _tables(shape, device)
    queries, contexts = zip(*shape.lengths, strict=True)
    starts = torch.tensor([0, *queries]).cumsum(0).to(device, torch.int32)
    context_lens = torch.tensor(contexts, dtype=torch.int32).to(device)
    q = torch.randn(
        shape.num_tokens, shape.num_heads, shape.head_dim, device=device, dtype=torch.bfloat16
    )
    out = torch.empty_like(q)
    workspace = _workspace(shape, device)
    launches = [] if workspace is None else [unpack_launch(kv, tables, workspace, chip)]
    read, at = (kv, tables) if workspace is None else (workspace.layer, workspace.tables)
    config = config or config_for(chip, read, q.dtype, windowed=shape.window is not None)
    plan = PrefillPlan.of(queries, contexts, window=shape.window, rows=config.rows, device=device)
    options: dict[str, Any] = {
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
        "softcap": shape.softcap,
    }
    attention = flash_attention_launch(
        q, read, at, starts, context_lens, plan.tiles, out, chip, config=config, **options
    )
    step = (q, kv, tables, starts, context_lens, plan)
    return Work(
        launches=[*launches, attention],
        outputs=[out],
        expected=lambda: [reference.flash_attention(*step, **options)],
        peers=_peers(q, kv) if shape.is_plain else {},
    )


def _peers(q: torch.Tensor, kv: KvLayer) -> dict[str, Callable[[], object]]:
    """PyTorch's backends on dense bf16 copies, [1, heads, T, D], each query head with K and V of
    its own, which every backend takes. (Blocks are in another order: the time is the same.)
    """
    num_tokens, num_heads, _ = q.shape
    group = num_heads // kv.num_kv_heads

    def dense(x: torch.Tensor, repeats: int) -> torch.Tensor:
        x = x.to(torch.bfloat16).repeat_interleave(repeats, 1)
        return x.transpose(0, 1)[None].contiguous()

    query = dense(q, 1)
    keys, values = (dense(x.flatten(0, 1)[:num_tokens], group) for x in (kv.k, kv.v))

    def attend(backend: SDPBackend) -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, is_causal=True)

    return {
        "sdpa flash": partial(attend, SDPBackend.FLASH_ATTENTION),
        "sdpa efficient": partial(attend, SDPBackend.EFFICIENT_ATTENTION),
        "sdpa cudnn": partial(attend, SDPBackend.CUDNN_ATTENTION),
    }
