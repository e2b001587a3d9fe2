"""Tensors without memory, for launches that are only looked at or compiled."""

from __future__ import annotations

import torch


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def floats(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.float32)


def int32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def int64(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)
