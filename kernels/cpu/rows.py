"""Norms and gated units on rows of float32; other types are left to plain torch.

Signatures and formulas are those of ``rms_norm/reference.py`` and ``gated/reference.py``.
"""

from __future__ import annotations

from ctypes import byref

import torch

from kvferry.kernels.cpu.library import CpuOps, Norm, Swiglu, cpu_ops
from kvferry.kernels.gated import reference as gated
from kvferry.kernels.rms_norm import reference as norms

LEAST_SHARED = 1 << 15
"""Elements from which on a second thread is worth its wake-up."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    ops = cpu_ops()
    if ops is None or unit_offset or not _are_float32(x, weight):
        return norms.rms_norm(x, weight, eps, unit_offset)
    return normed(ops, x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    ops = cpu_ops()
    if ops is None or unit_offset or not _are_float32(x, residual, weight):
        return norms.add_rms_norm(x, residual, weight, eps, unit_offset)
    return normed(ops, x, residual, weight, eps)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    ops = cpu_ops()
    if ops is None or not _are_float32(gate, up):
        return gated.swiglu(gate, up)
    return gated_unit(ops, gate, up)


def normed(
    ops: CpuOps,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual [..., C], and that sum; of x, and x, where there is no residual."""
    rows = _rows(x)
    y = torch.empty(rows.shape)
    total = x if residual is None else torch.empty(rows.shape)
    added = None if residual is None else _rows(residual)
    call = Norm(
        rows.data_ptr(),
        rows.stride(0),
        None if added is None else added.data_ptr(),
        0 if added is None else added.stride(0),
        weight.data_ptr(),
        total.data_ptr(),
        y.data_ptr(),
        *rows.shape,
        eps,
    )
    ops.norm(byref(call), ops.lanes, _workers(rows))
    return y.view(x.shape), total.view(x.shape)


def gated_unit(ops: CpuOps, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [..., I]."""
    gates, ups = _rows(gate), _rows(up)
    y = torch.empty(gates.shape)
    call = Swiglu(
        gates.data_ptr(),
        ups.data_ptr(),
        gates.stride(0),
        ups.stride(0),
        y.data_ptr(),
        *gates.shape,
    )
    ops.swiglu(byref(call), ops.lanes, _workers(gates))
    return y.view(gate.shape)


def _are_float32(*tensors: torch.Tensor) -> bool:
    return all(tensor.dtype is torch.float32 for tensor in tensors)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, size], of which each row is contiguous."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _workers(rows: torch.Tensor) -> int:
    return torch.get_num_threads() if rows.numel() >= LEAST_SHARED else 1
