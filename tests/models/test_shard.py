"""What each tensor-parallel rank holds: pure arithmetic, for every way to divide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import ConfigError
from kvferry.kv_transfer.layout import KvLayout
from kvferry.models.shard import ModelShard, shard_of
from kvferry.models.spec import ModelSpec, parse_spec


def spec_of(heads: int, kv_heads: int, intermediate: int = 48, vocab: int = 96) -> ModelSpec:
    return parse_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": heads * 8,
            "intermediate_size": intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": vocab,
            "max_position_embeddings": 32,
        }
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelSpec, list[ModelShard]]:
    kv_heads, group = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    size = draw(st.integers(1, kv_heads * group))
    sizes = st.integers(size, 400) | st.integers(size, 40).map(lambda n: n * 16)
    spec = spec_of(kv_heads * group, kv_heads, draw(sizes), draw(sizes))
    return spec, [shard_of(spec, rank, size) for rank in range(size)]


@given(splits())
def test_every_part_is_held_once_and_none_is_empty(
    case: tuple[ModelSpec, list[ModelShard]],
) -> None:
    spec, shards = case
    for name, count in (
        ("heads", spec.num_heads),
        ("intermediate", spec.intermediate_size),
        ("vocab", spec.vocab_size),
    ):
        spans = [getattr(shard, name) for shard in shards]
        assert all(span.length for span in spans)
        assert [i for span in spans for i in range(*span)] == list(range(count))


@given(splits())
def test_a_rank_holds_the_kv_heads_of_its_query_heads(
    case: tuple[ModelSpec, list[ModelShard]],
) -> None:
    spec, shards = case
    group = spec.num_heads // spec.num_kv_heads
    for shard in shards:
        assert {head // group for head in range(*shard.heads)} == set(range(*shard.kv_heads))
        # Attention takes one number of query heads per KV head.
        assert shard.heads.length % shard.kv_heads.length == 0
        local = shard.local(spec)
        assert (local.num_heads, local.num_kv_heads) == (
            shard.heads.length,
            shard.kv_heads.length,
        )


@given(splits())
def test_the_kv_plane_means_the_same_heads(case: tuple[ModelSpec, list[ModelShard]]) -> None:
    spec, shards = case
    layout = KvLayout(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=8,
        block_size=4,
        dtype="float32",
        tp=len(shards),
    )
    assert [layout.shard(rank).heads for rank in range(len(shards))] == [
        shard.kv_heads for shard in shards
    ]


def test_uneven_heads() -> None:
    """SmolLM2: 9 query and 3 KV heads."""
    smollm2 = spec_of(9, 3, 1536, 49152)
    two = [shard_of(smollm2, rank, 2) for rank in range(2)]
    assert [(s.heads.length, s.kv_heads.length) for s in two] == [(3, 1), (6, 2)]
    four = [shard_of(smollm2, rank, 4) for rank in range(4)]
    assert [(s.heads.length, s.kv_heads.length) for s in four] == [(1, 1), (2, 1), (3, 1), (3, 1)]


def test_rows_stay_together_in_sixteens_where_they_can() -> None:
    shards = [shard_of(spec_of(4, 4, 1536, 49152), rank, 3) for rank in range(3)]
    assert all(s.intermediate.begin % 16 == s.vocab.begin % 16 == 0 for s in shards)
    odd = [shard_of(spec_of(4, 4, 50, 49153), rank, 3) for rank in range(3)]
    assert [s.intermediate.length for s in odd] == [16, 17, 17]


def test_more_ranks_than_query_heads_are_refused_by_the_key() -> None:
    with pytest.raises(ConfigError, match=r"prefill.tp: 5 ranks .* 4 query heads"):
        shard_of(spec_of(4, 2), 0, 5, "prefill.tp")
