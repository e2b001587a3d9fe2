"""Which part of a decoder each tensor-parallel rank holds (Megatron-LM, arXiv 1909.08053). Pure.

Heads that do not divide are split unevenly, and KV heads of which there are fewer than ranks are
held by several; their query heads are then split among those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.core.errors import ConfigError
from kvferry.core.span import Span, share
from kvferry.models.spec import ModelSpec

UNIT = 16
"""Rows of a weight matrix that stay together where there are enough of them: what a vector of the
CPU's, or a tile of the GPU's, takes at once."""


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of rank ``rank`` of ``size``, in the numbering of the whole model."""

    rank: int
    size: int
    heads: Span
    """Query heads."""
    kv_heads: Span
    intermediate: Span
    vocab: Span

    def local(self, spec: ModelSpec) -> ModelSpec:
        """The numbers of the part: what attention and the cache of this rank see."""
        return replace(
            spec,
            num_heads=self.heads.length,
            num_kv_heads=self.kv_heads.length,
            intermediate_size=self.intermediate.length,
        )


def shard_of(spec: ModelSpec, rank: int, size: int, key: str = "tp") -> ModelShard:
    """What one of ``size`` ranks holds. Raises ConfigError naming ``key`` when there are more ranks
    than query heads.
    """
    if size > spec.num_heads:
        raise ConfigError(
            key, f"{size} ranks cannot share the {spec.num_heads} query heads of this model"
        )
    kv_heads = share(spec.num_kv_heads, rank, size)
    return ModelShard(
        rank=rank,
        size=size,
        heads=_query_heads(spec, rank, size),
        kv_heads=kv_heads,
        intermediate=_in_units(spec.intermediate_size, rank, size),
        vocab=_in_units(spec.vocab_size, rank, size),
    )


def _query_heads(spec: ModelSpec, rank: int, size: int) -> Span:
    group = spec.num_heads // spec.num_kv_heads
    mine = share(spec.num_kv_heads, rank, size)
    holders = [r for r in range(size) if share(spec.num_kv_heads, r, size) == mine]
    if len(holders) == 1:
        return mine.times(group)
    part = share(group, holders.index(rank), len(holders))
    first = mine.begin * group
    return Span(first + part.begin, first + part.end)


def _in_units(count: int, rank: int, size: int) -> Span:
    unit = UNIT if count % UNIT == 0 and count // UNIT >= size else 1
    return share(count // unit, rank, size).times(unit)
