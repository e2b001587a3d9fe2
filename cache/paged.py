"""The paged KV tensors of one worker.

Shapes: L num_layers, N num_blocks, S host slots, B block_size, H num_kv_heads, D head_dim.
Slot of token t of a sequence: ``block_table[t // B] * B + t % B``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.core.errors import ConfigError
from kvferry.core.units import format_bytes
from kvferry.kernels.kv_layer import QUANTISED_TYPES, KvLayer

MIN_BLOCKS = 4


@dataclass(slots=True, eq=False)
class PagedKV:
    """Keys (index 0) and values (index 1) of all layers, in blocks."""

    tensor: torch.Tensor
    """[L, 2, N, B, H, D]"""
    scales: torch.Tensor | None = None
    """float32 [L, 2, N, B, H], one per token and head, in a cache of int8 or FP8."""
    host: torch.Tensor | None = None
    """[L, 2, S, B, H, D] in host memory: where blocks of swapped sequences wait."""
    host_scales: torch.Tensor | None = None
    """float32 [L, 2, S, B, H]"""

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_slots: int = 0,
    ) -> PagedKV:
        """A zeroed cache: what is stale is finite, so that masked positions stay without effect.

        Host slots are written before they are read, and cost nothing before that.
        """
        shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        kv = cls(torch.zeros(shape, dtype=dtype, device=device))
        if dtype in QUANTISED_TYPES:
            kv.scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)
        if num_host_slots:
            shape = (num_layers, 2, num_host_slots, block_size, num_kv_heads, head_dim)
            # Copies to and from pageable memory would hold up the device.
            pinned = kv.tensor.is_cuda
            kv.host = torch.empty(shape, dtype=dtype, pin_memory=pinned)
            if kv.scales is not None:
                kv.host_scales = torch.empty(shape[:-1], dtype=torch.float32, pin_memory=pinned)
        return kv

    @property
    def num_layers(self) -> int:
        return self.tensor.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.tensor.shape[2]

    @property
    def num_host_slots(self) -> int:
        return 0 if self.host is None else self.host.shape[2]

    @property
    def block_size(self) -> int:
        return self.tensor.shape[3]

    @property
    def num_kv_heads(self) -> int:
        return self.tensor.shape[4]

    @property
    def head_dim(self) -> int:
        return self.tensor.shape[5]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def slots(self) -> torch.Tensor:
        """View [L, 2, N * B, H, D] that shares memory with ``tensor``."""
        return self.tensor.flatten(2, 3)

    def layer(self, index: int) -> KvLayer:
        """One layer as kernels take it, sharing memory."""
        scales = (None, None) if self.scales is None else self.scales[index].unbind()
        return KvLayer(*self.tensor[index].unbind(), *scales)


def block_nbytes(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block: keys and values of all layers, with the scales of quantised types."""
    scale_nbytes = torch.float32.itemsize if dtype in QUANTISED_TYPES else 0
    head_nbytes = head_dim * dtype.itemsize + scale_nbytes
    return num_layers * 2 * block_size * num_kv_heads * head_nbytes


def num_blocks_for(budget_nbytes: int, nbytes_per_block: int, *, key: str = "kv_memory") -> int:
    """Blocks that fit a budget. Raises ConfigError naming ``key`` when fewer than four do."""
    count = budget_nbytes // nbytes_per_block
    if count < MIN_BLOCKS:
        least = MIN_BLOCKS * nbytes_per_block
        raise ConfigError(
            key,
            f"{format_bytes(budget_nbytes)} is room for {count} KV blocks of "
            f"{format_bytes(nbytes_per_block)}, and at least {MIN_BLOCKS} are needed: "
            f"set it to {least} or more, or make block_size smaller",
        )
    return count
