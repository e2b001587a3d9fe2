"""Rows of an embedding table that is split by vocabulary over ranks, in plain torch.

Shapes: T tokens, V rows of this rank's shard, C hidden size.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding as rows_of


def embedding(token_ids: torch.Tensor, weight: torch.Tensor, shard_start: int = 0) -> torch.Tensor:
    """Rows of the ids in [shard_start, shard_start + V), zeros for all others: the sum over ranks
    is the embedding (Shoeybi et al., "Megatron-LM", arXiv:1909.08053). token_ids int64 [T], weight
    [V, C] -> [T, C].
    """
    local = token_ids - shard_start
    outside = (local < 0) | (local >= weight.shape[0])
    return rows_of(local.masked_fill(outside, 0), weight).masked_fill_(outside[:, None], 0)
