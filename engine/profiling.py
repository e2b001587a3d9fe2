"""The largest step that a pool allows, run to see what memory it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvferry.cache.paged import PagedKV
from kvferry.core.config import PoolConfig
from kvferry.engine.memory import CudaMemory, DeviceMemory, MemoryProfile, profile_step
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner
from kvferry.models.decoder import Decoder
from kvferry.models.parallel import Collectives


def largest_step(max_tokens: int, max_seqs: int, max_len: int, block_size: int) -> StepPlan:
    """As many tokens as a step may have, in as many sampled sequences as may be in one; each has
    blocks of its own, numbered from 0.
    """
    num_seqs = min(max_seqs, max_tokens)
    query_lens = np.full(num_seqs, max_tokens // num_seqs, np.int32)
    query_lens[: max_tokens % num_seqs] += 1
    query_lens = np.minimum(query_lens, max_len)
    per_seq = -(-int(query_lens[0]) // block_size)
    blocks = np.arange(num_seqs * per_seq, dtype=np.int32).reshape(num_seqs, per_seq)
    return StepPlan(
        step=0,
        token_ids=np.zeros(int(query_lens.sum()), np.int64),
        query_lens=query_lens,
        context_lens=np.zeros(num_seqs, np.int32),
        block_tables=blocks,
        sampled=np.arange(num_seqs, dtype=np.int32),
        sampling=SamplingRows.greedy(num_seqs),
    )


def profile_pool(
    decoder: Decoder,
    kv_dtype: torch.dtype,
    pool: PoolConfig,
    num_kv_heads: int,
    *,
    samples: bool = True,
    memory: DeviceMemory | None = None,
) -> MemoryProfile:
    """Memory of the decoder's device around its largest step. ``samples``: as the rank's runner
    does; all ranks of a group do this together. Raises torch.OutOfMemoryError.
    """
    spec, size = decoder.spec, pool.block_size
    device = next(decoder.parameters()).device
    plan = largest_step(pool.max_batch_tokens, pool.max_batch_seqs, spec.max_model_len, size)

    def run() -> int:
        kv = PagedKV.allocate(
            num_layers=spec.num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=spec.head_dim,
            block_size=size,
            # Workspaces are made for the longest sequence that the cache holds.
            num_blocks=max(plan.block_tables.size, -(-spec.max_model_len // size)),
            dtype=kv_dtype,
            device=device,
        )
        ModelRunner(decoder, kv, spec.vocab_size, samples=samples).execute(plan)
        return kv.tensor.nbytes + (0 if kv.scales is None else kv.scales.nbytes)

    return profile_step(memory or CudaMemory(device), run)


def least_over(
    ranks: Collectives | None, profile: MemoryProfile, device: str = "cpu"
) -> MemoryProfile:
    """Of all ranks, the least free memory and the largest step: their blocks are numbered alike.
    ``device``: of what they exchange.
    """
    if ranks is None:
        return profile
    mine = torch.zeros(ranks.size, 3, dtype=torch.float64, device=device)  # exact up to 2^53
    mine[ranks.rank] = torch.tensor([profile.total, profile.free, profile.step]).to(mine)
    total, free, step = ranks.sum(mine).unbind(1)
    # What is in use counts, where devices differ in size.
    in_use = int((total - free).max())
    least = int(total.min())
    return replace(profile, total=least, free=least - in_use, step=int(step.max()))
