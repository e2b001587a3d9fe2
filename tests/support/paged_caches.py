"""Paged caches full of noise, and what moving a token range means for them, token by token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_layer import QUANTISED_TYPES, dequantised, quantised
from kvferry.kernels.kv_pack.slab import KvSlots

EXACT_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaNs included."""
    tensor = torch.zeros(shape, dtype=dtype)
    values = np.random.default_rng(seed).integers(0, 256, tensor.nbytes, dtype=np.uint8)
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(values))
    return tensor


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> KvSlots:
    """[L, 2, S, H, D] of numbers that have a meaning, as a cache of ``dtype`` keeps them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= torch.exp(torch.randn(shape[:-1], generator=generator, dtype=torch.float64))[..., None]
    if dtype not in QUANTISED_TYPES:
        return KvSlots(x.to(dtype))
    elements, scales = quantised(x, dtype)
    assert scales is not None
    return KvSlots(elements.contiguous(), scales.contiguous())


def poison(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> KvSlots:
    """[L, 2, S, H, D] of noise."""
    scales = noise(shape[:-1], torch.float32, seed + 1) if dtype in QUANTISED_TYPES else None
    return KvSlots(noise(shape, dtype, seed), scales)


def copied(kv: KvSlots) -> KvSlots:
    return KvSlots(kv.elements.clone(), None if kv.scales is None else kv.scales.clone())


def same_bytes(a: KvSlots, b: KvSlots) -> bool:
    if as_bytes(a.elements) != as_bytes(b.elements):
        return False
    return a.scales is None or as_bytes(a.scales) == as_bytes(b.scales)


def slots_of(blocks: NDArray[np.int32], begin: int, end: int, block_size: int) -> list[int]:
    return [
        int(blocks[token // block_size]) * block_size + token % block_size
        for token in range(begin, end)
    ]


def picked(
    kv: KvSlots, slots: list[int], layers: tuple[int, int], heads: tuple[int, int]
) -> KvSlots:
    """[l, 2, len(slots), h, D]: slice and cat, token by token."""
    parts = []
    for tensor in (kv.elements, kv.scales):
        if tensor is None:
            continue
        part = tensor.view(torch.uint8).view(*tensor.shape[:4], -1)
        part = part[layers[0] : layers[1], :, :, heads[0] : heads[1]]
        chosen = torch.cat([part[:, :, slot : slot + 1] for slot in slots], dim=2).contiguous()
        chosen = chosen.view(tensor.dtype)
        parts.append(chosen if tensor.dim() == 5 else chosen.squeeze(-1))
    return KvSlots(*parts)


def converted(kv: KvSlots, dtype: torch.dtype) -> KvSlots:
    """The same numbers as a cache of ``dtype`` keeps them."""
    if kv.elements.dtype is dtype:
        return kv
    x = kv.elements if kv.scales is None else dequantised(kv.elements, kv.scales)
    if dtype not in QUANTISED_TYPES:
        return KvSlots(x.to(dtype))
    return KvSlots(*quantised(x, dtype))


def slab_bytes_of(kv: KvSlots) -> bytes:
    """Elements, then scales."""
    return as_bytes(kv.elements) + (b"" if kv.scales is None else as_bytes(kv.scales))


def put(
    kv: KvSlots,
    slots: list[int],
    layers: tuple[int, int],
    heads: tuple[int, int],
    part: KvSlots,
) -> None:
    """The reverse of ``picked``, in place."""
    for whole, piece in ((kv.elements, part.elements), (kv.scales, part.scales)):
        if whole is None or piece is None:
            continue
        target = whole.view(torch.uint8).view(*whole.shape[:4], -1)
        source = piece.contiguous().view(torch.uint8).view(*piece.shape[:4], -1)
        for index, slot in enumerate(slots):
            target[layers[0] : layers[1], :, slot, heads[0] : heads[1]] = source[:, :, index]
