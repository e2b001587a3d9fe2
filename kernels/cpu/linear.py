"""Products with weights in panels, for any number of rows.

Every element of a result is one chain of fused multiply-adds over the inputs, in their order,
whatever the number of rows, the kind of CPU and the number of threads: a row's result is the same
bit for bit alone and among others.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch.nn.functional import linear as vendor_linear

from kvferry.kernels.cpu.library import CpuOps, Product, cpu_ops
from kvferry.kernels.cpu.panels import PANEL


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias. x [..., K]; weight [N, K] for the vendor's product, or [N / 16, K, 16] for
    ours, which is of float32 alone; bias [N] -> [..., N].
    """
    if weight.dim() == 2:
        return vendor_linear(x, weight, bias)
    ops = cpu_ops()
    assert ops is not None, "weights are packed only where the library is"
    return product(ops, x, weight, bias)


def product(
    ops: CpuOps, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same with one library. Raises ValueError for what it does not compute."""
    panels, depth, lanes = weight.shape
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    is_whole = lanes == PANEL and weight[:1].is_contiguous()
    if not is_whole or rows.shape[1] != depth:
        raise ValueError(f"weight: panels {tuple(weight.shape)} for inputs {tuple(x.shape)}")
    if x.dtype is not torch.float32 or weight.dtype is not torch.float32:
        raise ValueError(f"x, weight: {x.dtype}, {weight.dtype}; must be float32")
    if bias is not None and (bias.shape != (panels * PANEL,) or not bias.is_contiguous()):
        raise ValueError(f"bias: {tuple(bias.shape)}, must be {panels * PANEL}, contiguous")
    y = torch.empty(rows.shape[0], panels * PANEL)
    call = Product(
        rows.data_ptr(),
        rows.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        y.stride(0),
        rows.shape[0],
        depth,
        panels,
    )
    ops.product(byref(call), ops.lanes, torch.get_num_threads())
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)
