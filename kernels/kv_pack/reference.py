"""Gather and scatter, block copies and swaps in plain torch, on any device.

Shapes are those of ``slab``. A call that moves returns totals, int64 [1 + num_tiles]: how many
token rows (one token in one row of the slab) were left out because their block is stale or outside
the cache, then the sum of every tile; ``digest.digests`` makes digests of these on the host. A
token that is left out is zeros in a gathered slab, and is not written by scatter.
"""

from __future__ import annotations

import torch

from kvferry.kernels.kv_layer import dequantised, quantised
from kvferry.kernels.kv_pack.digest import tile_sums
from kvferry.kernels.kv_pack.slab import (
    KvSlots,
    Range,
    SlabShape,
    Tokens,
    check_blocks,
    check_copy,
    check_slab,
    slab_shape,
    whole_blocks,
)


def gather(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: torch.Tensor,
) -> torch.Tensor:
    """Fill ``slab`` with a token range of a layer and head range, in the type ``wire``: totals."""
    shape = _checked(kv, tokens, layers, heads, wire, slab)
    slots, is_fresh = _slots(kv, tokens)
    x, scale = _rows(kv, layers, heads)
    scale = None if scale is None else scale[:, slots]
    x, scale = _converted(x[:, slots], scale, wire)
    # Through integers: FP8 has no zeros of its own in every torch.
    x = x.contiguous().view(torch.uint8)
    shape.elements(slab).view(torch.uint8).copy_(x.where(is_fresh[:, None, None], 0))
    slab_scales = shape.scales(slab)
    if slab_scales is not None and scale is not None:
        slab_scales.copy_(scale.where(is_fresh[:, None], 0.0))
    return _totals(slab, shape, is_fresh)


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
    shape = _checked(kv, tokens, layers, heads, wire, slab)
    slots, is_fresh = _slots(kv, tokens)
    slots = slots[is_fresh]
    slab_scales = shape.scales(slab)
    scale = None if slab_scales is None else slab_scales[:, is_fresh]
    x, scale = _converted(
        _as_bytes(shape.elements(slab))[:, is_fresh].view(wire), scale, kv.elements.dtype
    )
    rows, row_scales = _rows(kv, layers, heads)
    _as_bytes(rows)[:, slots] = _as_bytes(x)
    if row_scales is not None and scale is not None:
        row_scales[:, slots] = scale
    return _totals(slab, shape, is_fresh)


def copy_blocks(kv: KvSlots, block_size: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks, K and V of all layers with their scales: copy-on-write.

    sources, targets: int64 [n] block ids. Targets are distinct and none is a source.
    """
    kv.check()
    check_copy(kv, block_size, sources, targets)
    sources, targets = sources.to(kv.device), targets.to(kv.device)
    for tensor in (kv.elements, kv.scales):
        if tensor is not None:
            blocks = _as_bytes(tensor.unflatten(2, (-1, block_size)))
            blocks[:, :, targets] = blocks[:, :, sources]


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


def _checked(
    kv: KvSlots, tokens: Tokens, layers: Range, heads: Range, wire: torch.dtype, slab: torch.Tensor
) -> SlabShape:
    kv.check()
    tokens.check(kv)
    shape = slab_shape(kv, tokens, layers, heads, wire)
    check_slab(slab, shape, kv.device)
    return shape


def _slots(kv: KvSlots, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the tokens, int64 [T] (0 for a stale one), and which are fresh, bool [T]."""
    position = torch.arange(tokens.begin, tokens.end, device=kv.device)
    index = position // tokens.block_size
    block = tokens.blocks[index].to(torch.int64)
    is_fresh = (block >= 0) & (block < kv.num_slots // tokens.block_size)
    block = block.where(is_fresh, 0)
    if tokens.generations is not None:
        is_fresh &= tokens.generations.live[block] == tokens.generations.leased[index]
    return block * tokens.block_size + position % tokens.block_size, is_fresh


def _rows(kv: KvSlots, layers: Range, heads: Range) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of a range of the cache: [R, S, h, D] and [R, S, h]."""
    rows = kv.elements[layers[0] : layers[1]].flatten(0, 1)[:, :, heads[0] : heads[1]]
    if kv.scales is None:
        return rows, None
    return rows, kv.scales[layers[0] : layers[1]].flatten(0, 1)[:, :, heads[0] : heads[1]]


def _converted(
    x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [..., h, D] and scales [..., h] in another type; the same ones in the same type."""
    if x.dtype is dtype:
        return x, scale
    return quantised(dequantised(x, scale), dtype)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: torch indexes these in every element type."""
    return x.view(torch.uint8)


def _totals(slab: torch.Tensor, shape: SlabShape, is_fresh: torch.Tensor) -> torch.Tensor:
    num_stale = shape.rows * (~is_fresh).sum(0, keepdim=True)
    return torch.cat([num_stale, tile_sums(slab, shape)])
