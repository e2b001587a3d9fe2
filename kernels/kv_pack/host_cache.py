"""The paged cache in host memory as bytes, and what is moved out of it or into it.

Shapes: R rows (K and V of each layer in turn), S slots, H heads of the cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_layer import QUANTISED_TYPES
from kvferry.kernels.kv_pack.slab import WORD_BYTES, KvSlots, Range, SlabShape

Bytes = NDArray[np.uint8]


class CacheBytes:
    """The bytes of one tensor of the cache, [R, S, H, bytes of a head]."""

    def __init__(self, tensor: torch.Tensor) -> None:
        """tensor: [L, 2, S, H, D], contiguous."""
        _, _, self.num_slots, self.num_heads, head_dim = tensor.shape
        self.head_bytes: int = head_dim * tensor.itemsize
        self.slot_bytes = self.num_heads * self.head_bytes
        self.address: int = tensor.data_ptr()
        self.rows: Bytes = tensor.flatten(0, 1).flatten(1).view(torch.uint8).numpy()
        """[R, S * H * bytes of a head]"""
        self.row_bytes: int = self.rows.strides[0]
        self._units: dict[int, NDArray[Any]] = {}

    def units(self, nbytes: int) -> NDArray[Any]:
        """[R, units of so many bytes in a row]"""
        if nbytes not in self._units:
            self._units[nbytes] = self.rows.view(f"V{nbytes}")
        return self._units[nbytes]


class HostMove(NamedTuple):
    """A token range of a layer and head range of the cache, and the slab that it is moved to or
    from.
    """

    blocks: NDArray[np.int32]
    """[n] of the sequence from its first token."""
    tokens: Range
    layers: Range
    heads: Range
    wire: torch.dtype
    digest: str
    """Scheme; see ``host_digest``."""
    slab_index: int
    """Of the slab in its transfer."""


class HostCache:
    """The cache's tensors, with all views of them that are worth keeping."""

    def __init__(self, kv: KvSlots, block_size: int) -> None:
        if kv.elements.device.type != "cpu" or not kv.elements.is_contiguous():
            raise ValueError("kv.elements: must be contiguous, in host memory")
        if (kv.scales is not None) != (kv.elements.dtype in QUANTISED_TYPES):
            raise ValueError("kv.scales: must be given for int8 and FP8, and for them alone")
        self.num_layers, _, self.num_slots, self.num_heads, self.head_dim = kv.elements.shape
        self.dtype = kv.elements.dtype
        self.block_size = block_size
        self.elements = CacheBytes(kv.elements)
        self.places: dict[Any, Any] = {}
        """Of whoever moves bytes: what it works out once for each shape of a move."""
        self.scales = None if kv.scales is None else CacheBytes(kv.scales.unsqueeze(-1))

    @property
    def tensors(self) -> tuple[CacheBytes, ...]:
        return (self.elements,) if self.scales is None else (self.elements, self.scales)

    def shape(self, move: HostMove) -> SlabShape:
        """The slab of a move. Raises ValueError for a range that is not there."""
        for name, (begin, end), count in (
            ("layers", move.layers, self.num_layers),
            ("heads", move.heads, self.num_heads),
            ("tokens", move.tokens, len(move.blocks) * self.block_size),
        ):
            if not 0 <= begin < end <= count:
                raise ValueError(f"{name}: [{begin}, {end}) is not within [0, {count})")
        if move.wire in QUANTISED_TYPES and self.head_dim % WORD_BYTES:
            raise ValueError(f"wire: {self.head_dim} of {move.wire} are no whole 32-bit words")
        return _shape(
            2 * (move.layers[1] - move.layers[0]),
            move.tokens[1] - move.tokens[0],
            move.heads[1] - move.heads[0],
            self.head_dim,
            move.wire,
        )


@lru_cache(maxsize=1024)
def _shape(rows: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> SlabShape:
    """Shared by the moves of equal shape, which are most."""
    return SlabShape(rows=rows, tokens=tokens, heads=heads, head_dim=head_dim, dtype=dtype)
