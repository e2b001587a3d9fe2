"""What a worker computes with: a runner, the paged cache it writes, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cache.paged import PagedKV
from kvferry.core.ids import BlockHash
from kvferry.engine.plan import Runner


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything a role needs to know of the model and its cache."""

    runner: Runner
    kv: PagedKV
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    root: BlockHash
    """Root of the block hash chain."""
    vocab_size: int = 2**31 - 1
    """Token ids that the model knows are below it."""
