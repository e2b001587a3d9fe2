"""Attention in plain torch over a cache of int8 or FP8: values are quantised as they are written
and dequantised as they are gathered, with one scale per token and head (``kernels.kv_layer``).
"""

from __future__ import annotations

import torch

from kvferry.cache.paged import PagedKV
from kvferry.engine.attention import PagedAttention
from kvferry.engine.step_tensors import StepTensors
from kvferry.kernels.kv_layer import dequantised, quantised


class QuantisedAttention(PagedAttention):
    """The decoder's ``attend`` callback for one step. New tokens attend to each other as the cache
    holds them, so that a prompt's outputs do not depend on how it is cut into chunks.
    """

    def __init__(self, kv: PagedKV, tensors: StepTensors) -> None:
        super().__init__(kv, tensors)
        assert kv.scales is not None, "a cache that is not quantised"
        self._dtype = kv.dtype
        # Bytes: torch moves FP8 about on every device, but indexes it on few.
        self._bytes = self._keys_values.view(torch.int8)
        self._scratch_bytes = self._scratch.view(torch.int8)
        self._scales = kv.scales.flatten(2, 3)

    def _write(
        self, layer: int, parts: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        held = []
        for part, x in enumerate(parts):
            elements, scale = quantised(x, self._dtype)
            assert scale is not None
            cache, scales = self._bytes[layer, part], self._scales[layer, part]
            cache.index_copy_(0, self._write_slots, elements.view(torch.int8))
            scales.index_copy_(0, self._write_slots, scale)
            held.append(dequantised(elements, scale))
        return held[0], held[1]

    def _gather(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = []
        for part, scratch in enumerate(self._scratch_bytes):
            into = scratch[: len(slots)]
            torch.index_select(self._bytes[layer, part], 0, slots, out=into)
            scale = self._scales[layer, part].index_select(0, slots)
            held.append(dequantised(into.view(self._dtype), scale))
        return held[0], held[1]
