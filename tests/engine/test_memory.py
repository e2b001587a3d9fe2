"""How large a KV cache may be: the arithmetic, and what a profiled step tells of a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rank_threads import on_ranks
from tiny_models import save, tiny_model

from kvferry.cache.paged import block_nbytes
from kvferry.core.config import PoolConfig
from kvferry.core.errors import ConfigError
from kvferry.engine.loading import allocate_kv
from kvferry.engine.memory import (
    MemoryProfile,
    kv_budget,
    measured_budget,
    no_step_fits,
    profile_step,
)
from kvferry.engine.profiling import largest_step, least_over, profile_pool
from kvferry.models.load import load_model
from kvferry.models.shard import shard_of
from kvferry.models.spec import ModelSpec, read_spec

GIB = 2**30


class FakeMemory:
    """A device of 80 GiB, of which others use 3."""

    def __init__(self, own: int = 16 * GIB, kept: int = 0) -> None:
        self.own, self.kept, self.peak = own, kept, own
        self.calls: list[str] = []

    def settle(self) -> None:
        self.calls.append("settle")
        self.kept, self.peak = 0, self.own

    def allocated(self) -> int:
        return self.own

    def peak_allocated(self) -> int:
        return self.peak

    def free_and_total(self) -> tuple[int, int]:
        self.calls.append("free")
        return 77 * GIB - self.own - self.kept, 80 * GIB

    def take_and_return(self, nbytes: int) -> None:
        self.calls.append("run")
        self.peak = max(self.peak, self.own + nbytes)
        self.kept += nbytes


def test_the_cache_gets_what_weights_others_and_a_step_leave() -> None:
    memory = FakeMemory(kept=5 * GIB)

    def run() -> int:
        memory.take_and_return(7 * GIB)
        return GIB

    profile = profile_step(memory, run)
    # What the step gave back for reuse is free again before anybody asks how much is free.
    assert memory.calls == ["settle", "run", "settle", "free"]
    assert profile == MemoryProfile(total=80 * GIB, free=61 * GIB, step=6 * GIB)
    assert measured_budget(profile, 0.9, "decode").nbytes == (72 - 19 - 6) * GIB


@given(st.integers(1, 2**40), st.floats(0, 1), st.integers(0, 2**38), st.floats(0.01, 1.0))
def test_the_budget_is_never_more_than_is_there(
    total: int, free_share: float, step: int, fraction: float
) -> None:
    free = int(total * free_share)
    nbytes = kv_budget(total=total, free=free, step=step, fraction=fraction)
    assert nbytes <= free - step
    assert nbytes <= total * fraction
    # Nothing is lost but what is named.
    assert nbytes + step + (total - free) == int(total * fraction)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(
        tiny_model("llama", torch.float32, max_position_embeddings=64),
        tmp_path_factory.mktemp("tiny"),
    )


def profile_with_room(spec: ModelSpec, pool: PoolConfig, num_blocks: int) -> MemoryProfile:
    nbytes = block_nbytes(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=pool.block_size,
        dtype=torch.float32,
    )
    room = num_blocks * nbytes
    profile = MemoryProfile(total=80 * GIB, free=61 * GIB, step=6 * GIB)
    return replace(profile, free=profile.free - 47 * GIB + room)


def test_all_of_a_measured_budget_becomes_blocks(folder: Path) -> None:
    spec, pool = read_spec(folder, 64), PoolConfig(block_size=4)
    budget = measured_budget(profile_with_room(spec, pool, 17), 0.9, "decode")
    kv = allocate_kv(spec, torch.float32, pool, budget, [shard_of(spec, 0, 1)])
    assert kv.num_blocks == 17


@pytest.mark.parametrize("num_blocks", [0, 3, 15])
def test_a_device_without_room_is_refused_with_the_arithmetic(
    folder: Path, num_blocks: int
) -> None:
    spec, pool = read_spec(folder, 64), PoolConfig(block_size=4)
    budget = measured_budget(profile_with_room(spec, pool, num_blocks), 0.9, "decode")
    with pytest.raises(ConfigError) as refused:
        allocate_kv(spec, torch.float32, pool, budget, [shard_of(spec, 0, 1)])
    assert refused.value.key == "decode.gpu_memory"
    said = str(refused.value)
    for part in ("90% of 85.9 GB", "6.4 GB for a step", f"room for {num_blocks} blocks of 4"):
        assert part in said
    assert "64 tokens needs 16" in said
    assert "max_batch_tokens" in said


def test_a_step_that_does_not_fit_names_what_to_lower() -> None:
    error = no_step_fits("prefill", RuntimeError("CUDA out of memory.\nMany words"))
    assert error.key == "prefill.max_batch_tokens"
    assert "CUDA out of memory." in str(error)
    assert "\n" not in str(error)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 64), st.integers(1, 8))
def test_the_largest_step(max_tokens: int, max_seqs: int, max_len: int, block_size: int) -> None:
    plan = largest_step(max_tokens, max_seqs, max_len, block_size)
    num_seqs = min(max_seqs, max_tokens)
    assert len(plan.sampled) == len(plan.query_lens) == num_seqs
    assert plan.query_lens.sum() == len(plan.token_ids) == min(max_tokens, num_seqs * max_len)
    assert 1 <= plan.query_lens.min() <= plan.query_lens.max() <= max_len
    blocks = [
        plan.block_tables[seq, : -(-int(count) // block_size)].tolist()
        for seq, count in enumerate(plan.query_lens)
    ]
    named = [block for table in blocks for block in table]
    assert len(set(named)) == len(named)
    assert max(named) < plan.block_tables.size


def test_ranks_agree_on_the_tightest_device() -> None:
    profiles = [
        MemoryProfile(total=80 * GIB, free=61 * GIB, step=6 * GIB),
        MemoryProfile(total=80 * GIB + 1, free=50 * GIB, step=5 * GIB + 1),
        MemoryProfile(total=79 * GIB, free=78 * GIB, step=1),
    ]
    agreed = on_ranks(3, lambda ranks: least_over(ranks, profiles[ranks.rank]))
    in_use = 30 * GIB + 1
    expected = MemoryProfile(total=79 * GIB, free=79 * GIB - in_use, step=6 * GIB)
    assert agreed == [expected] * 3
    budgets = [measured_budget(profile, 0.9, "decode").nbytes for profile in profiles]
    assert measured_budget(expected, 0.9, "decode").nbytes <= min(budgets)
    assert least_over(None, profiles[0]) == profiles[0]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_pool_is_profiled_by_a_real_step(folder: Path, kv_dtype: torch.dtype) -> None:
    decoder, memory = load_model(folder, torch.float32, 64), FakeMemory()
    pool = PoolConfig(block_size=4, max_batch_tokens=40, max_batch_seqs=3)
    heads = decoder.spec.num_kv_heads
    profile = profile_pool(decoder, kv_dtype, pool, heads, memory=memory)
    cache = 16 * block_nbytes(
        num_layers=decoder.spec.num_layers,
        num_kv_heads=heads,
        head_dim=decoder.spec.head_dim,
        block_size=4,
        dtype=kv_dtype,
    )
    assert profile.step == -cache, "one sequence of the limit is not the step's"
    assert memory.calls == ["settle", "settle", "free"]
