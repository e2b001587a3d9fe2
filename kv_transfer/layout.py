"""The shape of one worker's KV cache, as its hello states it (``worker.KvLayout``), and which part
of it each of the worker's ranks holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvferry.core.dtypes import ELEMENT_BYTES as ELEMENT_BYTES
from kvferry.core.dtypes import QUANTISED_BYTES as QUANTISED_BYTES
from kvferry.core.span import Span, share

SCALE_BYTES = 4
"""float32, one per token, head and K or V, in quantised types."""


class Shard(NamedTuple):
    """Layers and KV heads that one rank holds, in the numbering of the whole model."""

    layers: Span
    heads: Span

    def token_bytes(self, head_bytes: int) -> int:
        """K and V of one token. ``head_bytes``: one head of K or V with its scale."""
        return 2 * self.layers.length * self.heads.length * head_bytes


def head_nbytes(head_dim: int, dtype: str) -> int:
    """K or V of one token, one layer, one head, with its scale in a quantised type."""
    scale = SCALE_BYTES if dtype in QUANTISED_BYTES else 0
    return head_dim * ELEMENT_BYTES[dtype] + scale


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape, element type and split of a worker's KV cache.

    Ranks are numbered stage by stage: rank r is tensor-parallel rank ``r % tp`` of pipeline stage
    ``r // tp``. Raises ValueError for numbers below 1, unknown types, more stages than layers.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: str
    tp: int = 1
    """Ranks among which each stage splits its heads; above ``num_kv_heads``, heads are held by
    several."""
    pp: int = 1
    """Pipeline stages among which the layers are split."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size", "tp", "pp"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvLayout.{name} must be at least 1")
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"KvLayout.dtype {self.dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
        if self.pp > self.num_layers:
            raise ValueError(f"KvLayout.pp: {self.pp} stages for {self.num_layers} layers")

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    def shard(self, rank: int) -> Shard:
        """What a rank holds. Raises ValueError for a rank that is not there."""
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} of {self.num_ranks}")
        stage, part = divmod(rank, self.tp)
        return Shard(
            share(self.num_layers, stage, self.pp), share(self.num_kv_heads, part, self.tp)
        )

    @property
    def whole(self) -> Shard:
        """All layers and heads."""
        return Shard(Span(0, self.num_layers), Span(0, self.num_kv_heads))

    @property
    def head_bytes(self) -> int:
        """K or V of one token, one layer, one head, with its scale."""
        return head_nbytes(self.head_dim, self.dtype)

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers and heads."""
        return self.whole.token_bytes(self.head_bytes)

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer, all heads."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """One block in all layers and heads."""
        return self.block_size * self.token_bytes
