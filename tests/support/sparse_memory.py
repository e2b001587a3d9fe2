"""Tensors as large as a cache of a GPU, in memory that exists where something was written."""

from __future__ import annotations

import mmap

import torch

WRAP = 2**31
"""Elements before and after every tensor of ``sparse``: an offset that was computed in 32 bits and
has wrapped lands among them, on zeros, instead of outside the process.
"""
_NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE: what is never touched is not counted."""


def sparse(*shape: int, dtype: torch.dtype, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Zeros of a shape, contiguous or with ``strides``."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    nbytes = (2 * WRAP + extent) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=dtype)
    return flat.as_strided(shape, strides, WRAP)
