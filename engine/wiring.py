"""The parts of a worker that both roles build the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.cache.block_pool import BlockPool
from kvferry.core.config import Config, PoolConfig
from kvferry.engine.backend import Backend
from kvferry.engine.commit import StopRules
from kvferry.engine.sequences import Sequences
from kvferry.engine.session import SessionSettings
from kvferry.engine.steps import Stepper
from kvferry.engine.table import SequenceTable


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Accounting of one worker: no tensors."""

    pool: BlockPool
    sequences: Sequences
    stepper: Stepper


def build_parts(
    backend: Backend, pool: PoolConfig, lease_s: float, clock: Callable[[], float]
) -> EngineParts:
    blocks = BlockPool(backend.kv.num_blocks, prefix_cache=pool.prefix_cache)
    table = SequenceTable(pool.max_batch_seqs, backend.max_model_len, pool.block_size)
    sequences = Sequences(table, blocks, backend.root, clock, lease_s)
    return EngineParts(
        blocks, sequences, Stepper(sequences, StopRules(table, backend.eos_token_ids))
    )


def session_settings(config: Config, pool: PoolConfig, secret: str) -> SessionSettings:
    return SessionSettings(
        host=pool.host,
        secret=secret,
        beat_s=config.cluster.beat_s,
        silence_s=config.cluster.silence_s,
    )
