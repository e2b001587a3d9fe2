"""Tensor parallelism, put on a decoder from outside (Megatron-LM, arXiv 1909.08053, section 3).

    embedding    rows of the vocabulary      sum over ranks
    q, k, v      output rows (heads)         nothing
    o            input columns (heads)       sum over ranks
    gate, up     output rows                 nothing
    down         input columns               sum over ranks
    lm_head      rows of the vocabulary      gathered on rank 0, which samples

The weights of a rank are views of the whole ones, so that ranks of one host share their pages.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from kvferry.core.span import Span
from kvferry.kernels.cpu.panels import narrowed
from kvferry.models.decoder import Decoder, Embedding, Linear
from kvferry.models.shard import ModelShard, shard_of


class Collectives(Protocol):
    """What the ranks of one worker do together, each calling in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, the same bits on each. May overwrite it."""
        ...

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """x [R, widths[rank]] of all ranks, side by side, on rank 0; on others [R, 0]."""
        ...


class SumOverRanks(nn.Module):
    """What another module computes of a part, summed over the parts."""

    def __init__(self, part: nn.Module, ranks: Collectives) -> None:
        super().__init__()
        self.part = part
        self._ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self.part(x))


class VocabPart(nn.Module):
    """The rows of an embedding that one rank holds; zeros for tokens that others hold."""

    def __init__(self, table: Embedding, vocab: Span) -> None:
        super().__init__()
        self.table = table
        self._vocab = vocab

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] int64 -> [T, C]."""
        local = token_ids - self._vocab.begin
        is_here = (local >= 0) & (local < self._vocab.length)
        rows: Tensor = self.table(local.where(is_here, torch.zeros_like(local)))
        return rows.masked_fill_(~is_here[:, None], 0)


class GatheredHead(nn.Module):
    """Logits of a part of the vocabulary, gathered on rank 0."""

    def __init__(self, part: Linear, widths: list[int], ranks: Collectives) -> None:
        super().__init__()
        self.part = part
        self._widths = widths
        self._ranks = ranks

    @property
    def weight(self) -> Tensor:
        return self.part.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] -> [R, V] on rank 0, [R, 0] on others."""
        if not len(hidden):
            return hidden.new_empty(0, sum(self._widths))
        return self._ranks.gather(self.part(hidden), self._widths)


def parallelise(decoder: Decoder, ranks: Collectives, key: str = "tp") -> Decoder:
    """Keep this rank's part of a filled decoder, in place; with one rank, all of it.

    Raises ConfigError naming ``key`` as ``shard_of`` does.
    """
    if ranks.size == 1:
        return decoder
    shards = [shard_of(decoder.spec, rank, ranks.size, key) for rank in range(ranks.size)]
    shard = shards[ranks.rank]
    for layer in decoder.model.layers:
        _share_attention(layer.self_attn, shard, ranks)
        _share_mlp(layer.mlp, shard, ranks)
    decoder.model.embed_tokens.weight = _part(decoder.model.embed_tokens.weight, 0, shard.vocab)
    embedding = VocabPart(decoder.model.embed_tokens, shard.vocab)
    decoder.model.embed_tokens = SumOverRanks(embedding, ranks)
    _keep_rows(decoder.lm_head, shard.vocab)
    decoder.lm_head = GatheredHead(decoder.lm_head, [s.vocab.length for s in shards], ranks)
    decoder.spec = shard.local(decoder.spec)
    return decoder


def _share_attention(attention: nn.Module, shard: ModelShard, ranks: Collectives) -> None:
    queries = shard.heads.times(attention.head_dim)
    keys = shard.kv_heads.times(attention.head_dim)
    _keep_rows(attention.q_proj, queries)
    _keep_rows(attention.k_proj, keys)
    _keep_rows(attention.v_proj, keys)
    _keep_columns(attention.o_proj, queries, shard.rank)
    attention.o_proj = SumOverRanks(attention.o_proj, ranks)


def _share_mlp(mlp: nn.Module, shard: ModelShard, ranks: Collectives) -> None:
    _keep_rows(mlp.gate_proj, shard.intermediate)
    _keep_rows(mlp.up_proj, shard.intermediate)
    _keep_columns(mlp.down_proj, shard.intermediate, shard.rank)
    mlp.down_proj = SumOverRanks(mlp.down_proj, ranks)


def _keep_rows(linear: Linear, rows: Span) -> None:
    linear.weight = _weight_part(linear.weight, 0, rows)
    if linear.bias is not None:
        linear.bias = _part(linear.bias, 0, rows)
    linear.out_features = rows.length


def _keep_columns(linear: Linear, columns: Span, rank: int) -> None:
    linear.weight = _weight_part(linear.weight, 1, columns)
    if rank:
        linear.bias = None  # it is added once
    linear.in_features = columns.length


def _weight_part(weight: Tensor, dim: int, span: Span) -> nn.Parameter:
    """Of a matrix [N, K], or of its panels."""
    part = narrowed(weight, dim, span.begin, span.length)
    return nn.Parameter(part, requires_grad=False)


def _part(weight: Tensor, dim: int, span: Span) -> nn.Parameter:
    return nn.Parameter(weight.narrow(dim, span.begin, span.length), requires_grad=False)
