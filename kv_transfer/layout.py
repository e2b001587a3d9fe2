"""The shape of one worker's KV cache, as its hello states it (``worker.KvLayout``)."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.config import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape and element type of a KV cache.

    Raises ValueError for numbers below 1 and unknown types.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""
    dtype: str

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KvLayout.{name} must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KvLayout.dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")

    @property
    def flavour(self) -> str:
        """Element type and scaling: what the bytes of a slab mean."""
        return self.dtype

    @property
    def head_bytes(self) -> int:
        """K or V of one token, one layer, one head."""
        return self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer, all heads."""
        return 2 * self.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.num_layers * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        """One block in all layers."""
        return self.block_size * self.token_bytes
