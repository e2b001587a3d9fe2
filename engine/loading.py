"""From a model folder to a backend that has run one real step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvferry.cache.hashing import SCHEME_VERSION
from kvferry.cache.paged import MIN_BLOCKS, PagedKV, block_nbytes, num_blocks_for
from kvferry.core.config import CPU_KV_NBYTES, DecodeConfig, ModelConfig, PoolConfig
from kvferry.core.errors import ConfigError, RankLost, StartupError
from kvferry.engine.backend import Backend, ModelIdentity
from kvferry.engine.collectives import collectives
from kvferry.engine.cuda_capture import CudaCapture
from kvferry.engine.determinism import check_deterministic
from kvferry.engine.follower import Follower
from kvferry.engine.graphs import log_progress
from kvferry.engine.memory import KvBudget, measured_budget, no_step_fits, stated_budget
from kvferry.engine.parallel_runner import ParallelRunner
from kvferry.engine.plan import Runner, SamplingRows, StepPlan
from kvferry.engine.profiling import least_over, profile_pool
from kvferry.engine.rank_group import OPERATION_S, RankGroup
from kvferry.engine.runner import ModelRunner
from kvferry.models.identity import tokenizer_digest, weights_digest
from kvferry.models.load import load_model
from kvferry.models.parallel import Collectives
from kvferry.models.shard import ModelShard, shard_of
from kvferry.models.spec import ModelSpec, read_spec


def load_backend(
    folder: Path,
    vocab_size: int,
    model: ModelConfig,
    pool: PoolConfig,
    pool_name: str,
    group: RankGroup | None = None,
    timeout_s: float = OPERATION_S,
    device: str = "cpu",
) -> Backend:
    """Load a ready Hugging Face folder. ``vocab_size`` is the tokenizer's; ``device``: ``cpu``, or
    ``cuda`` for the one GPU that this process sees.

    ``group``: this is its rank 0, and the other ranks come and load theirs within ``timeout_s``; it
    is closed when that fails.

    Raises ModelLoadError for the checkpoint, ConfigError when the cache cannot hold one sequence
    of the context limit, StartupError when a rank is missing.
    """
    if group is None:
        backend = load_part(folder, vocab_size, model, pool, pool_name, device=device)
        _warm_up(backend.runner)
        if device != "cpu" and model.cuda_graphs == "auto" and isinstance(pool, DecodeConfig):
            _capture(backend, pool)
        return backend
    try:
        group.join_all(timeout_s)
        ranks = collectives(group.store, 0, group.size, OPERATION_S, device, model.deterministic)
        group.abort = ranks.abort
        part = load_part(folder, vocab_size, model, pool, pool_name, ranks, device)
        endpoints = group.wait_ready(timeout_s)
        backend = replace(
            part,
            runner=ParallelRunner(part.runner, group),
            group=group,
            rank_endpoints=tuple(endpoints),
        )
        _warm_up(backend.runner)
        return backend
    except BaseException as error:
        group.close()
        if isinstance(error, RankLost):
            raise StartupError(f"{pool_name}.tp: {error}") from error
        raise


def load_part(
    folder: Path,
    vocab_size: int,
    model: ModelConfig,
    pool: PoolConfig,
    pool_name: str,
    ranks: Collectives | None = None,
    device: str = "cpu",
) -> Backend:
    """One rank's part, which has run nothing yet; without ``ranks`` all of it. Raises as
    ``load_backend`` does, and ConfigError for more ranks than can share the model.
    """
    torch.set_num_threads(pool.threads)
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError("cluster.device", f"there is no {device} device on this host; set cpu")
    spec = read_spec(folder, model.max_model_len)
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    shards = [shard_of(spec, r, size, f"{pool_name}.tp") for r in range(size)]
    decoder = load_model(
        folder,
        getattr(torch, model.dtype),
        model.max_model_len,
        device,
        batch_invariant=model.deterministic,
        ranks=ranks,
    )
    kv_dtype = getattr(torch, pool.cache_dtype(model))
    budget = stated_budget(pool.kv_memory or CPU_KV_NBYTES, pool_name)
    if device != "cpu" and pool.kv_memory is None:
        heads = shards[rank].kv_heads.length
        try:
            profile = profile_pool(decoder, kv_dtype, pool, heads, samples=rank == 0)
        except torch.OutOfMemoryError as error:
            raise no_step_fits(pool_name, error) from error
        budget = measured_budget(least_over(ranks, profile, device), pool.gpu_memory, pool_name)
    kv = allocate_kv(spec, kv_dtype, pool, budget, shards, rank, device)
    if model.deterministic:
        check_deterministic(decoder, kv)
    digests = weights_digest(folder), tokenizer_digest(folder)
    runner = ModelRunner(decoder, kv, vocab_size, samples=rank == 0)
    return Backend(
        runner=runner,
        launcher=runner if ranks is None and device != "cpu" else None,
        kv=kv,
        max_model_len=spec.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        identity=ModelIdentity(SCHEME_VERSION, *digests, model.dtype),
        vocab_size=spec.vocab_size,
        num_kv_heads=spec.num_kv_heads,
    )


def load_follower(
    follower: Follower,
    folder: Path,
    vocab_size: int,
    model: ModelConfig,
    pool: PoolConfig,
    pool_name: str,
    device: str = "cpu",
) -> Backend:
    """The part of a rank other than 0, once all have joined. Raises RankLost, and as ``load_part``
    does.
    """
    ranks = collectives(
        follower.store, follower.rank, pool.tp, OPERATION_S, device, model.deterministic
    )
    follower.abort = ranks.abort
    return load_part(folder, vocab_size, model, pool, pool_name, ranks, device)


def allocate_kv(
    spec: ModelSpec,
    dtype: torch.dtype,
    pool: PoolConfig,
    budget: KvBudget,
    shards: Sequence[ModelShard],
    rank: int = 0,
    device: str = "cpu",
) -> PagedKV:
    """As many blocks as the budget holds on the rank with the most heads: all ranks number them
    alike. Raises ConfigError with the arithmetic.
    """
    shape = {
        "num_layers": spec.num_layers,
        "num_kv_heads": shards[rank].kv_heads.length,
        "head_dim": spec.head_dim,
        "block_size": pool.block_size,
    }
    most = {**shape, "num_kv_heads": max(shard.kv_heads.length for shard in shards)}
    nbytes = block_nbytes(**most, dtype=dtype)
    room = budget.nbytes // nbytes
    needed = -(-spec.max_model_len // pool.block_size)
    if room < needed:
        raise ConfigError(
            budget.key,
            f"{budget.origin} is room for {room} blocks of {pool.block_size} tokens, and one "
            f"sequence of {spec.max_model_len} tokens needs {needed}: "
            + budget.advice(max(needed, MIN_BLOCKS) * nbytes),
        )
    num_blocks = num_blocks_for(budget.nbytes, nbytes, key=budget.key)
    slots = pool.host_nbytes // nbytes
    return PagedKV.allocate(
        **shape, num_blocks=num_blocks, dtype=dtype, device=device, num_host_slots=slots
    )


def _capture(backend: Backend, pool: DecodeConfig) -> None:
    runner = backend.runner
    assert isinstance(runner, ModelRunner), "graphs are of one rank's own steps"
    capture = CudaCapture(backend.kv.tensor.device)
    runner.capture_graphs(capture, log_progress, pool.max_batch_seqs)


def _warm_up(runner: Runner) -> None:
    """One real step, so that a worker that says it is there can compute. Block 0 is free again."""
    one = np.ones(1, np.int32)
    runner.execute(
        StepPlan(
            step=0,
            token_ids=np.zeros(1, np.int64),
            query_lens=one,
            context_lens=np.zeros(1, np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            sampled=np.zeros(1, np.int32),
            sampling=SamplingRows.greedy(1),
        )
    )
