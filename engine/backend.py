"""What a worker computes with: a runner, the paged cache it writes, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvferry.cache.hashing import root_hash
from kvferry.cache.paged import PagedKV, block_nbytes, num_blocks_for
from kvferry.core.config import ModelConfig, PoolConfig
from kvferry.core.errors import ConfigError
from kvferry.core.ids import BlockHash
from kvferry.core.units import format_bytes
from kvferry.engine.plan import Runner
from kvferry.engine.runner import ModelRunner
from kvferry.models.identity import weights_digest
from kvferry.models.load import load_model
from kvferry.models.spec import read_spec

HASH_SCHEME = 1


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a role needs to know of the model and its cache."""

    runner: Runner
    kv: PagedKV
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    root: BlockHash
    """Root of the block hash chain."""


def load_backend(
    folder: Path, vocab_size: int, model: ModelConfig, pool: PoolConfig, pool_name: str
) -> Backend:
    """Load a ready Hugging Face folder on the CPU. ``vocab_size`` is the tokenizer's.

    Raises ModelLoadError for the checkpoint, ConfigError when the cache cannot hold one sequence
    of the context limit.
    """
    torch.set_num_threads(pool.threads)
    spec = read_spec(folder, model.max_model_len)
    kv_dtype: torch.dtype = getattr(torch, model.kv_dtype or model.dtype)
    shape = {
        "num_layers": spec.num_layers,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "block_size": pool.block_size,
    }
    nbytes = block_nbytes(**shape, dtype=kv_dtype)
    num_blocks = num_blocks_for(pool.kv_memory, nbytes, key=f"{pool_name}.kv_memory")
    if num_blocks * pool.block_size < spec.max_model_len:
        raise ConfigError(
            f"{pool_name}.kv_memory",
            f"{format_bytes(pool.kv_memory)} holds {num_blocks} blocks of {pool.block_size} tokens, less than "
            f"one sequence of {spec.max_model_len} tokens: raise it to "
            f"{-(-spec.max_model_len // pool.block_size) * nbytes} bytes, or lower model.max_model_len",
        )
    kv = PagedKV.allocate(**shape, num_blocks=num_blocks, dtype=kv_dtype)
    decoder = load_model(folder, getattr(torch, model.dtype), model.max_model_len)
    return Backend(
        runner=ModelRunner(decoder, kv, vocab_size),
        kv=kv,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        root=root_hash(
            HASH_SCHEME, weights_digest(folder), "", model.dtype, str(kv_dtype).split(".")[1]
        ),
    )
