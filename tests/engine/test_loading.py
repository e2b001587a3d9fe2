"""From a folder to a backend: what ranks agree on, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE, save, tiny_model

from kvferry.cache.paged import PagedKV
from kvferry.core.config import DecodeConfig, ModelConfig, PoolConfig, PrefillConfig
from kvferry.core.errors import ConfigError, StartupError
from kvferry.engine.loading import allocate_kv, load_backend, load_part
from kvferry.engine.memory import stated_budget
from kvferry.engine.rank_group import RankGroup
from kvferry.models.shard import shard_of
from kvferry.models.spec import read_spec

MODEL = ModelConfig(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    path = tmp_path_factory.mktemp("nine")
    return save(tiny_model("llama", torch.float32, **heads), path)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_all_ranks_have_as_many_blocks_whatever_heads_they_hold(folder: Path, tp: int) -> None:
    spec = read_spec(folder)
    pool = PoolConfig(block_size=4, kv_memory="1MiB")
    budget = stated_budget(2**20, "p")
    shards = [shard_of(spec, rank, tp) for rank in range(tp)]
    caches = [allocate_kv(spec, torch.float32, pool, budget, shards, rank) for rank in range(tp)]
    assert len({cache.num_blocks for cache in caches}) == 1
    assert [cache.num_kv_heads for cache in caches] == [s.kv_heads.length for s in shards]
    assert all(cache.tensor.nbytes <= pool.kv_memory for cache in caches)
    fullest = max(cache.tensor.nbytes for cache in caches)
    assert fullest + fullest // caches[0].num_blocks > pool.kv_memory


@pytest.mark.parametrize("tp", [1, 2])
def test_host_memory_holds_as_many_blocks_on_all_ranks_and_none_where_there_is_none(
    folder: Path, tp: int
) -> None:
    spec = read_spec(folder)
    budget = stated_budget(2**20, "p")
    shards = [shard_of(spec, rank, tp) for rank in range(tp)]

    def caches(pool: PoolConfig) -> list[PagedKV]:
        ranks = range(tp)
        return [allocate_kv(spec, torch.float32, pool, budget, shards, rank) for rank in ranks]

    for cache in caches(DecodeConfig(block_size=4, swap_memory="128KiB")):
        assert cache.num_host_slots == caches(PoolConfig(block_size=4))[0].num_blocks // 8 > 0
        assert cache.host is not None
        assert cache.host.nbytes <= 2**17
    for pool in (DecodeConfig(block_size=4, swap_memory=0), PrefillConfig(block_size=4)):
        assert {cache.num_host_slots for cache in caches(pool)} == {0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_its_key(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.device: there is no cuda device"):
        load_part(folder, VOCAB_SIZE, MODEL, PoolConfig(), "prefill", device="cuda")


def test_a_group_whose_ranks_do_not_come_is_a_start_that_failed(folder: Path) -> None:
    group = RankGroup(2, "secret")
    with pytest.raises(StartupError, match=r"decode.tp: 1 ranks did not come within"):
        load_backend(folder, VOCAB_SIZE, MODEL, PoolConfig(tp=2), "decode", group, 0.05)
