"""The parts of a worker that both roles build the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.cache.block_pool import BlockPool
from kvferry.core.config import NODE_HOST, Config, PoolConfig, parse_config
from kvferry.core.ids import BlockHash, new_incarnation
from kvferry.engine.backend import Backend
from kvferry.engine.commit import StopRules
from kvferry.engine.sequences import Sequences
from kvferry.engine.session import SessionSettings
from kvferry.engine.steps import Stepper
from kvferry.engine.table import SequenceTable
from kvferry.proto import worker_pb2 as pb
from kvferry.proto.session import PROTOCOL


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Accounting of one worker: no tensors."""

    pool: BlockPool
    sequences: Sequences
    stepper: Stepper


def build_parts(
    backend: Backend,
    pool: PoolConfig,
    root: BlockHash,
    lease_s: float,
    clock: Callable[[], float],
) -> EngineParts:
    """``root``: of this worker's block hash chain."""
    blocks = BlockPool(backend.kv.num_blocks, prefix_cache=pool.prefix_cache)
    table = SequenceTable(
        pool.max_batch_seqs, backend.max_model_len, pool.block_size, backend.eos_token_ids
    )
    sequences = Sequences(table, blocks, root, clock, lease_s, backend.vocab_size)
    return EngineParts(blocks, sequences, Stepper(sequences, StopRules(table)))


def config_on_host(values: dict[str, Any], address: Callable[[], str]) -> Config:
    """A configuration as it is on this host: ``address`` is asked where a pool listens on ``node``.

    Raises ConfigError.
    """
    return parse_config(
        {
            name: {**section, "host": address()} if section.get("host") == NODE_HOST else section
            for name, section in values.items()
        }
    )


def session_settings(config: Config, pool: PoolConfig, secret: str) -> SessionSettings:
    return SessionSettings(
        host=pool.host,
        secret=secret,
        beat_s=config.cluster.beat_s,
        silence_s=config.cluster.silence_s,
    )


def worker_hello(
    worker_id: str, role: str, backend: Backend, pool: PoolConfig, root: BlockHash
) -> pb.WorkerHello:
    """What a worker says of itself; where and in which form KV moves is added by its role."""
    identity = backend.identity
    return pb.WorkerHello(
        worker_id=worker_id,
        incarnation=backend.group.incarnation if backend.group else new_incarnation(),
        role=role,
        protocol=PROTOCOL,
        root_hash=root,
        model=pb.ModelIdentity(
            hash_scheme=identity.hash_scheme,
            weights=identity.weights,
            tokenizer=identity.tokenizer,
            dtype=identity.dtype,
        ),
        num_blocks=backend.kv.num_blocks,
        max_model_len=backend.max_model_len,
        prefix_cache=pool.prefix_cache,
        max_batch_tokens=pool.max_batch_tokens,
        max_batch_seqs=pool.max_batch_seqs,
    )
