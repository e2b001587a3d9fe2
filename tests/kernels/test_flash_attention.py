"""flash_attention in Triton's interpreter against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from kernel_data import assert_close, random_tensors

from kvferry.kernels.chips import INTERPRETER
from kvferry.kernels.flash_attention import reference, wrapper
from kvferry.kernels.flash_attention.configs import Config
from kvferry.kernels.flash_attention.plan import PrefillPlan
from kvferry.kernels.kv_layer import KvLayer, quantised

# One rounding of the weights and one of the output; float32: another order of sums, exp2 for exp.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A ragged batch over a cache in blocks of random order, NaN where no token is."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, cached context) per sequence."""
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    config: Config = field(default_factory=lambda: Config(rows=16, keys=16, buffers=2))
    seed: int = 0

    def check(self) -> None:
        random = random_tensors(self.seed)
        torch.manual_seed(self.seed)
        lens = [sum(lengths) for lengths in self.lengths]
        blocks_of = [-(-length // self.block_size) for length in lens]
        num_blocks = sum(blocks_of) + 2
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        (k, k_scale), (v, v_scale) = (quantised(random(*shape), self.cache_dtype) for _ in "kv")
        order = torch.randperm(num_blocks, dtype=torch.int32)
        # Entries of the table that no token needs are out of bounds.
        tables = torch.full((len(lens), max(blocks_of) + 1), 2**30, dtype=torch.int32)
        used = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for seq, blocks in enumerate(order[: sum(blocks_of)].split(blocks_of)):
            tables[seq, : len(blocks)] = blocks
            for i, block in enumerate(blocks.tolist()):
                used[block, : lens[seq] - i * self.block_size] = True
        for tensor in (k, v) if k_scale is None else (k_scale, v_scale):
            tensor[~used] = torch.nan
        kv = KvLayer(k, v, k_scale, v_scale)
        queries, contexts = zip(*self.lengths, strict=True)
        starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
        context_lens = torch.tensor(contexts, dtype=torch.int32)
        q = random(sum(queries), self.num_kv_heads * self.group, self.head_dim, dtype=self.dtype)
        plan = PrefillPlan.of(queries, contexts, window=self.window, rows=self.config.rows)
        out = torch.empty_like(q)
        options = {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "softcap": self.softcap,
        }
        wrapper.flash_attention_launch(
            q,
            kv,
            tables,
            starts,
            context_lens,
            torch.from_numpy(plan.tiles),
            out,
            INTERPRETER,
            config=self.config,
            **options,
        ).run()
        expected = reference.flash_attention(q, kv, tables, starts, context_lens, plan, **options)
        assert_close(out, expected, BOUNDS)


def test_a_mixed_batch() -> None:
    Batch(lengths=((5, 0), (33, 20), (1, 40)), group=3, num_kv_heads=2).check()


def test_quantised_in_one_block() -> None:
    Batch(
        lengths=((20, 30),),
        head_dim=80,
        block_size=64,
        dtype=torch.bfloat16,
        cache_dtype=torch.float8_e4m3fn,
        window=24,
    ).check()
