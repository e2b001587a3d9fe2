"""A safetensors file written tensor by tensor, so that a conversion holds one tensor at a time.

Layout: u64 header length, JSON header, data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_ALIGNMENT = 64


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    produce: Callable[[str], Tensor],
) -> None:
    """Write the tensors ``produce(name)`` in the order of ``shapes``, all as ``dtype``, and sync
    them to disk.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Spaces after the header are part of the format; they bring the data to a cache line.
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            _write_tensor(file, name, shape, produce(name).to(dtype))
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, name: str, shape: tuple[int, ...], tensor: Tensor) -> None:
    """Append one tensor's bytes. A call of its own: no tensor outlives it into the next."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, announced as {tuple(shape)}")
    file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
