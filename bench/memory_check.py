"""Whether a KV cache as large as a profile run allows leaves room for the largest step."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvferry.bench.engine_check import CONFIG, Setting, on_backend, random_decoder
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.cache.paged import PagedKV, block_nbytes
from kvferry.core.config import PoolConfig
from kvferry.core.units import format_bytes
from kvferry.engine.memory import CudaMemory, DeviceMemory, measured_budget
from kvferry.engine.profiling import largest_step, profile_pool
from kvferry.engine.runner import ModelRunner
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder
from kvferry.models.spec import parse_spec

FRACTION = 0.9
SLACK = 64 << 20
"""Bytes by which a runtime's own memory may grow between two looks at the device."""


def check_memory(
    device: torch.device,
    memory: DeviceMemory | None = None,
    *,
    decoder: Decoder | None = None,
    pool: PoolConfig | None = None,
) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """Profile, fill, and run the largest step again: what is then in use is within the share."""
    memory = memory or CudaMemory(device)
    pool = pool or PoolConfig(max_batch_tokens=8192, gpu_memory=FRACTION)
    setting = Setting(
        backend=Backend.TRITON, device=device, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
    )
    decoder = decoder or on_backend(random_decoder(parse_spec(CONFIG), seed=0), setting)
    spec, dtype = decoder.spec, decoder.dtype
    profile = profile_pool(decoder, dtype, pool, spec.num_kv_heads, memory=memory)
    budget = measured_budget(profile, pool.gpu_memory, "decode")
    shape = {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": pool.block_size,
    }
    num_blocks = budget.nbytes // block_nbytes(**shape, dtype=dtype)
    kv = PagedKV.allocate(**shape, num_blocks=num_blocks, dtype=dtype, device=device)
    memory.settle()
    plan = largest_step(
        pool.max_batch_tokens, pool.max_batch_seqs, spec.max_model_len, pool.block_size
    )
    before = memory.allocated()
    ModelRunner(decoder, kv, spec.vocab_size).execute(replace(plan, step=1))
    step = memory.peak_allocated() - before
    free, total = memory.free_and_total()
    over = total - free - int(total * pool.gpu_memory)
    row: dict[str, Scalar] = {
        "profile": budget.origin.removesuffix(", which"),
        "blocks": num_blocks,
        "cache": format_bytes(kv.tensor.nbytes),
        "step as profiled": format_bytes(profile.step),
        "step beside the cache": format_bytes(step),
        "over the share": over,
    }
    return [row], [
        Claim(id="gpu.memory_over_share", value=max(over - SLACK, 0), better=Better.LOWER, goal=0)
    ]
