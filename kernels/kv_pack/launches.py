"""The launches behind ``wrapper``: tiles, grids and pointers, from shapes alone."""

from __future__ import annotations

from typing import Any

import torch

from kvferry.kernels.chips import Chip
from kvferry.kernels.kv_layer import kind_of
from kvferry.kernels.kv_pack.copy_kernel import copy_blocks_kernel
from kvferry.kernels.kv_pack.kernel import convert_kernel, move_kernel
from kvferry.kernels.kv_pack.slab import WORD_BYTES, KvSlots, Range, SlabShape, Tokens
from kvferry.kernels.launch import Launch, next_power_of_2

WORDS_PER_PROGRAM = 4096
"""16 KiB: eight 16-byte accesses per thread of four warps."""
MAX_BLOCK_W = 1024
ELEMENTS_PER_PROGRAM = 4096
"""Of one head; a thread then holds 32 of them in float32."""


def move_launch(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    shape: SlabShape,
    slab: torch.Tensor,
    totals: torch.Tensor,
    is_gather: bool,
    chip: Chip,
) -> Launch:
    """Gather or scatter of a range that ``slab_shape`` has checked.

    Adds to ``totals``, int64 [1 + num_tiles], which must hold zeros: see ``reference``.
    """
    _, _, num_slots, num_heads, _ = kv.elements.shape
    is_same = shape.dtype is kv.elements.dtype
    kinds = _word_tiles(shape) if is_same else _element_tiles(kv, shape, chip)
    cut, generations = shape.cut, tokens.generations
    runs_per_tile = -(-cut.tokens_per_tile // kinds["BLOCK_T"])
    scales = None if kv.scales is None else _part(kv.scales, layers, heads)
    return Launch(
        kernel=move_kernel if is_same else convert_kernel,
        grid=(cut.tiles_per_row * runs_per_tile, shape.rows),
        args={
            "p_cache": _stored(_part(kv.elements, layers, heads), is_same),
            "p_cache_scale": _stored(scales, is_same),
            "p_slab": _stored(shape.elements(slab), is_same),
            "p_slab_scale": _stored(shape.scales(slab), is_same),
            "p_blocks": tokens.blocks,
            "p_live": None if generations is None else generations.live,
            "p_leased": None if generations is None else generations.leased,
            "p_totals": totals,
            "begin": tokens.begin,
            "num_tokens": tokens.count,
            "num_slots": num_slots,
            "rows_per_tile": cut.rows_per_tile,
            "tokens_per_tile": cut.tokens_per_tile,
            "runs_per_tile": runs_per_tile,
            "tiles_per_row": cut.tiles_per_row,
        },
        constants={
            "BLOCK_SIZE": tokens.block_size,
            "CHECK": generations is not None,
            "GATHER": is_gather,
            "CACHE_HEADS": num_heads,
            "HEADS": shape.heads,
            "HEAD_WORDS": shape.head_words,
            **kinds,
        },
        num_warps=4,
    )


def copy_launch(
    kv: KvSlots, block_size: int, sources: torch.Tensor, targets: torch.Tensor, chip: Chip
) -> Launch:
    """Copies of whole blocks that ``check_copy`` has checked. All chips have the same tile."""
    num_layers, _, num_slots, num_heads, head_dim = kv.elements.shape
    words = block_size * num_heads * head_dim * kv.elements.itemsize // WORD_BYTES
    scale_words = 0 if kv.scales is None else block_size * num_heads
    block = min(WORDS_PER_PROGRAM, next_power_of_2(words))
    parts, scale_parts = -(-words // block), -(-scale_words // block)
    return Launch(
        kernel=copy_blocks_kernel,
        grid=(len(sources) * (parts + scale_parts), 2 * num_layers),
        args={
            "p_elements": _stored(kv.elements, True),
            "p_scales": _stored(kv.scales, True),
            "p_sources": sources,
            "p_targets": targets,
            "num_blocks": num_slots // block_size,
        },
        constants={
            "WORDS": words,
            "PARTS": parts,
            "SCALE_WORDS": scale_words,
            "SCALE_PARTS": scale_parts,
            "BLOCK": block,
        },
        num_warps=4,
    )


def _word_tiles(shape: SlabShape) -> dict[str, Any]:
    block_w = min(MAX_BLOCK_W, next_power_of_2(shape.token_words))
    return {
        "SCALED": shape.is_quantised,
        "BLOCK_T": WORDS_PER_PROGRAM // block_w,
        "BLOCK_W": block_w,
        "BLOCK_H": next_power_of_2(shape.heads),
    }


def _element_tiles(kv: KvSlots, shape: SlabShape, chip: Chip) -> dict[str, Any]:
    block_d = next_power_of_2(shape.head_dim)
    return {
        "CACHE_KIND": kind_of(kv.elements.dtype, chip),
        "SLAB_KIND": kind_of(shape.dtype, chip),
        "HEAD_DIM": shape.head_dim,
        "BLOCK_T": max(1, ELEMENTS_PER_PROGRAM // block_d),
        "BLOCK_D": block_d,
        "BLOCK_W": block_d * shape.dtype.itemsize // WORD_BYTES,
    }


def _part(tensor: torch.Tensor, layers: Range, heads: Range) -> torch.Tensor:
    """View of a layer and head range of [L, 2, S, H, ...]."""
    return tensor[layers[0] : layers[1], :, :, heads[0] : heads[1]]


def _stored(tensor: torch.Tensor | None, as_words: bool) -> torch.Tensor | None:
    """As 32-bit words, or in a type that Triton takes on every chip: FP8 as uint8."""
    if tensor is None:
        return None
    if as_words:
        return tensor.view(torch.int32)
    return tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
