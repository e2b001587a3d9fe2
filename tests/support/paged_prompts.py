"""Random prompts over a paged cache: inputs of attention kernels, poisoned where no token is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kernel_data import random_tensors

from kvferry.kernels.chips import INTERPRETER, Chip
from kvferry.kernels.flash_attention import reference, wrapper
from kvferry.kernels.flash_attention.configs import Config
from kvferry.kernels.flash_attention.device_plan import PrefillPlan
from kvferry.kernels.kv_layer import KvLayer, quantised

SMALL = Config(rows=16, keys=16, buffers=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A ragged batch over a cache in blocks of random order."""

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
    config: Config = SMALL
    chip: Chip = INTERPRETER
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "softcap": self.softcap}

    def inputs(self) -> Inputs:
        """Slots without a token hold NaN (scales do where elements cannot), and so do those that
        no query sees because of the window; table entries without a block are out of bounds.
        """
        random = random_tensors(self.seed)
        shuffle = torch.Generator().manual_seed(self.seed)
        blocks_of = [-(-sum(lengths) // self.block_size) for lengths in self.lengths]
        num_blocks = sum(blocks_of) + 2
        shape = (num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        (k, k_scale), (v, v_scale) = (quantised(random(*shape), self.cache_dtype) for _ in "kv")
        order = torch.randperm(num_blocks, dtype=torch.int32, generator=shuffle)
        tables = torch.full((len(blocks_of), max(blocks_of) + 1), 2**30, dtype=torch.int32)
        unused = torch.ones(num_blocks, self.block_size, dtype=torch.bool)
        for seq, blocks in enumerate(order[: sum(blocks_of)].split(blocks_of)):
            queries, context = self.lengths[seq]
            tables[seq, : len(blocks)] = blocks
            begin = 0 if self.window is None else max(0, context + 1 - self.window)
            tokens = torch.arange(begin, queries + context)
            unused[blocks[tokens // self.block_size].long(), tokens % self.block_size] = False
        for tensor in (k, v) if k_scale is None or v_scale is None else (k_scale, v_scale):
            tensor[unused] = torch.nan
        num_queries, contexts = zip(*self.lengths, strict=True)
        return Inputs(
            q=random(
                sum(num_queries), self.num_kv_heads * self.group, self.head_dim, dtype=self.dtype
            ),
            kv=KvLayer(k, v, k_scale, v_scale),
            tables=tables,
            starts=torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32),
            contexts=torch.tensor(contexts, dtype=torch.int32),
            plan=PrefillPlan.of(num_queries, contexts, window=self.window, rows=self.config.rows),
        )

    def attend(self, inputs: Inputs) -> torch.Tensor:
        """The kernel's answer, in this batch's tiles."""
        out = torch.empty_like(inputs.q)
        wrapper.flash_attention_launch(
            inputs.q,
            inputs.kv,
            inputs.tables,
            inputs.starts,
            inputs.contexts,
            inputs.plan.tiles,
            out,
            self.chip,
            config=self.config,
            **self.options,
        ).run()
        return out

    def expected(self, inputs: Inputs) -> torch.Tensor:
        """The reference's answer."""
        # It reads every slot and masks later, so it gets a cache without NaN.
        kv = inputs.kv
        clean = KvLayer(
            *(None if x is None else _without_nan(x) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale))
        )
        return reference.flash_attention(
            inputs.q,
            clean,
            inputs.tables,
            inputs.starts,
            inputs.contexts,
            inputs.plan,
            **self.options,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Arguments of flash_attention."""

    q: torch.Tensor
    kv: KvLayer
    tables: torch.Tensor
    starts: torch.Tensor
    contexts: torch.Tensor
    plan: PrefillPlan


def _without_nan(x: torch.Tensor) -> Any:
    return torch.nan_to_num(x) if x.dtype.is_floating_point and x.itemsize > 1 else x
