"""The layout carries what the hello of a worker carries, and says what each rank holds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvferry.core.span import Span
from kvferry.kv_transfer.layout import ELEMENT_BYTES, KvLayout
from kvferry.proto import worker_pb2

VALUES: dict[str, Any] = {
    "num_layers": 30,
    "num_kv_heads": 3,
    "head_dim": 64,
    "block_size": 16,
    "dtype": "bfloat16",
}


def test_fields_are_those_of_the_wire() -> None:
    ours = [field.name for field in dataclasses.fields(KvLayout)]
    assert ours == [field.name for field in worker_pb2.KvLayout.DESCRIPTOR.fields]


def test_sizes() -> None:
    layout = KvLayout(**VALUES)
    assert layout.head_bytes == 128
    assert layout.layer_token_bytes == 2 * 3 * 64 * 2
    assert layout.token_bytes == 30 * layout.layer_token_bytes
    assert layout.block_bytes == 16 * layout.token_bytes


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_head_of_a_quantised_type_has_a_scale(dtype: str) -> None:
    assert KvLayout(**(VALUES | {"dtype": dtype})).head_bytes == 64 + 4


@pytest.mark.parametrize("dtype", sorted(ELEMENT_BYTES))
def test_each_type_has_the_size_that_torch_gives_it(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    assert getattr(torch, dtype).itemsize == ELEMENT_BYTES[dtype]


@pytest.mark.parametrize(
    "name", ["num_layers", "num_kv_heads", "head_dim", "block_size", "tp", "pp"]
)
def test_numbers_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KvLayout(**(VALUES | {name: 0}))


def test_unknown_element_types_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        KvLayout(**(VALUES | {"dtype": "complex64"}))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="31 stages for 30 layers"):
        KvLayout(**(VALUES | {"pp": 31}))


def heads_of(num_kv_heads: int, tp: int) -> list[Span]:
    layout = KvLayout(**(VALUES | {"num_kv_heads": num_kv_heads, "tp": tp}))
    return [layout.shard(rank).heads for rank in range(tp)]


@pytest.mark.parametrize("tp", range(1, 9))
@pytest.mark.parametrize("num_kv_heads", range(1, 13))
def test_heads_are_split_evenly_or_shared_evenly(num_kv_heads: int, tp: int) -> None:
    spans = heads_of(num_kv_heads, tp)
    holders = [sum(span.begin <= head < span.end for span in spans) for head in range(num_kv_heads)]
    lengths = [span.length for span in spans]
    assert spans == sorted(spans)
    assert min(lengths) >= 1
    assert min(holders) >= 1
    if tp <= num_kv_heads:
        assert set(holders) == {1}
        assert max(lengths) - min(lengths) <= 1
    else:
        assert set(lengths) == {1}
        assert max(holders) - min(holders) <= 1


def test_examples_of_splits() -> None:
    assert heads_of(8, 3) == [Span(0, 2), Span(2, 5), Span(5, 8)]
    assert heads_of(2, 4) == [Span(0, 1), Span(0, 1), Span(1, 2), Span(1, 2)]
    assert heads_of(3, 1) == [Span(0, 3)]


@pytest.mark.parametrize("pp", [1, 2, 3, 7, 30])
def test_stages_follow_each_other_and_have_all_heads(pp: int) -> None:
    layout = KvLayout(**(VALUES | {"pp": pp, "tp": 2}))
    assert layout.num_ranks == 2 * pp
    end = 0
    for stage in range(pp):
        shards = [layout.shard(2 * stage + part) for part in range(2)]
        assert {shard.layers for shard in shards} == {shards[0].layers}
        assert [shard.heads for shard in shards] == heads_of(3, 2)
        assert shards[0].layers.begin == end
        assert shards[0].layers.length in (30 // pp, 30 // pp + 1)
        end = shards[0].layers.end
    assert end == 30


@pytest.mark.parametrize("rank", [-1, 6])
def test_ranks_that_are_not_there(rank: int) -> None:
    with pytest.raises(ValueError, match="of 6"):
        KvLayout(**(VALUES | {"tp": 3, "pp": 2})).shard(rank)


def test_spans() -> None:
    assert Span(2, 5).length == 3
    assert Span(2, 5).overlaps(Span(4, 9))
    assert not Span(2, 5).overlaps(Span(5, 9))
    assert not Span(5, 9).overlaps(Span(2, 5))
    assert Span(2, 5).within(Span(2, 5))
    assert not Span(2, 5).within(Span(2, 4))
    assert not Span(2, 2).within(Span(0, 9))
    assert Span(2, 5).common(Span(4, 9)) == (4, 5)
    assert Span(2, 5).common(Span(7, 9)).length == 0
    assert Span(7, 9).common(Span(2, 5)).length == 0
    assert Span(7, 9).relative_to(6) == (1, 3)
