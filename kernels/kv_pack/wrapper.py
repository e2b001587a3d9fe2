"""Gather and scatter, block copies and swaps on the GPU: same functions as ``reference``.

Swaps are staged: gather into a slab on the device, then one asynchronous copy. The copy engine
moves one large range at the bus's full rate and holds no multiprocessor; a kernel that wrote pinned
memory itself would sit on the chip for as long as the bus takes, beside the decode steps that the
swap makes room for.
"""

from __future__ import annotations

import torch

from kvferry.kernels.kv_pack.launches import copy_launch, move_launch
from kvferry.kernels.kv_pack.slab import (
    KvSlots,
    Range,
    Tokens,
    check_blocks,
    check_copy,
    check_slab,
    slab_shape,
    whole_blocks,
)
from kvferry.kernels.launch import chip_of


def gather(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: torch.Tensor,
) -> torch.Tensor:
    """Fill ``slab`` with a token range of a layer and head range, in the type ``wire``: totals."""
    return _move(kv, tokens, layers, heads, wire, slab, True)


def scatter(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: torch.Tensor,
) -> torch.Tensor:
    """Write ``slab`` into a token range of a layer and head range, in the cache's type: totals, of
    the very bytes written.
    """
    return _move(kv, tokens, layers, heads, wire, slab, False)


def _move(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: torch.Tensor,
    is_gather: bool,
) -> torch.Tensor:
    kv.check()
    tokens.check(kv)
    shape = slab_shape(kv, tokens, layers, heads, wire)
    check_slab(slab, shape, kv.device)
    totals = torch.zeros(1 + shape.cut.num_tiles, dtype=torch.int64, device=kv.device)
    chip = chip_of(kv.device)
    move_launch(kv, tokens, layers, heads, shape, slab, totals, is_gather, chip).run()
    return totals


def copy_blocks(kv: KvSlots, block_size: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks, K and V of all layers with their scales: copy-on-write.

    sources, targets: int64 [n] block ids. Targets are distinct and none is a source.
    """
    kv.check()
    check_copy(kv, block_size, sources, targets)
    sources, targets = (x.to(kv.device, non_blocking=True) for x in (sources, targets))
    copy_launch(kv, block_size, sources, targets, chip_of(kv.device)).run()


def swap_out(
    kv: KvSlots, block_size: int, blocks: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """Copy whole blocks, all layers, to ``host`` by way of ``staging``: totals.

    blocks: int32 or int64 [n]; staging (on the cache's device) and host: flat uint8 of
    ``swap_nbytes``. The copy to pinned host memory is asynchronous on the current stream.
    """
    tokens, layers, heads = whole_blocks(kv, block_size, blocks)
    check_blocks(staging, host)
    totals = gather(kv, tokens, layers, heads, kv.elements.dtype, staging)
    host.copy_(staging, non_blocking=True)
    return totals


def swap_in(
    kv: KvSlots, block_size: int, blocks: torch.Tensor, staging: torch.Tensor, host: torch.Tensor
) -> torch.Tensor:
    """The reverse of ``swap_out``, into the same or other blocks: totals, equal when the host kept
    its bytes.
    """
    tokens, layers, heads = whole_blocks(kv, block_size, blocks)
    check_blocks(staging, host)
    staging.copy_(host, non_blocking=True)
    return scatter(kv, tokens, layers, heads, kv.elements.dtype, staging)
