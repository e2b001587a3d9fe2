"""Gather KV out of the paged cache into a slab in host memory, and scatter a slab back, on the CPU.

Shapes: slots [num_layers, 2, num_slots, num_heads, head_dim] (a view of the paged cache), slot_ids
[num_tokens] int64, slab: flat bytes of [layers, 2, tokens, heads, head_dim]. Both return one digest
per tile.

The copies are numpy's: they let other threads run, and unlike torch's they start no team of threads
beside the one that the model computes with. Integers stand in for the types that numpy lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_pack.tiles import Tile, tiles

Digest = Callable[[int, memoryview], int]
"""(number of the tile in its slab, its bytes) -> digest."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    slab: memoryview,
    digest: Digest,
) -> list[int]:
    """Copy the tokens at ``slot_ids`` of a layer and head range into ``slab``.

    Each tile is digested while its bytes are hot. Raises IndexError for a slot outside the cache,
    ValueError when the slab has another size.
    """
    rows, ids = _rows(slots, layers, heads), slot_ids.numpy()
    row_token_bytes = _check(rows, ids, slab)
    out = np.frombuffer(slab, rows.dtype)
    digests = []
    for number, tile in enumerate(tiles(len(rows), len(ids), row_token_bytes)):
        source = rows[tile.row_begin : tile.row_end]
        part = _part(out, tile, rows)
        tokens = ids[tile.token_begin : tile.token_end]
        if source.flags.c_contiguous:
            # The slots are checked, so clip changes none; it spares numpy a copy of the result.
            np.take(source, tokens, axis=1, out=part, mode="clip")
        else:
            part[...] = source[:, tokens]
        digests.append(digest(number, slab[tile.offset : tile.offset + tile.nbytes]))
    return digests


def scatter(
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    layers: tuple[int, int],
    heads: tuple[int, int],
    slab: memoryview,
    digest: Digest,
) -> list[int]:
    """Copy ``slab`` into the tokens at ``slot_ids``; the reverse of gather.

    The digests are of the very bytes written: a peer that shares the slab may change it at any
    moment, so each tile is first copied to private memory, and digest and write both read that
    copy.
    """
    rows, ids = _rows(slots, layers, heads), slot_ids.numpy()
    row_token_bytes = _check(rows, ids, slab)
    source = np.frombuffer(slab, rows.dtype)
    digests = []
    for number, tile in enumerate(tiles(len(rows), len(ids), row_token_bytes)):
        private = _part(source, tile, rows).copy()
        digests.append(digest(number, private.data.cast("B")))
        tokens = ids[tile.token_begin : tile.token_end]
        rows[tile.row_begin : tile.row_end, tokens] = private
    return digests


def _rows(slots: torch.Tensor, layers: tuple[int, int], heads: tuple[int, int]) -> NDArray[Any]:
    """View of the range as [2 * layers, num_slots, heads, head_dim], in integers of equal size."""
    part = slots[layers[0] : layers[1]].view(_WORDS[slots.itemsize])
    rows: NDArray[Any] = part.view(-1, *slots.shape[2:])[:, :, heads[0] : heads[1]].numpy()
    return rows


def _part(flat: NDArray[Any], tile: Tile, rows: NDArray[Any]) -> NDArray[Any]:
    """View of a tile within a flat slab, [rows, tokens, heads, head_dim]."""
    begin, end = tile.offset // flat.itemsize, (tile.offset + tile.nbytes) // flat.itemsize
    num_rows, num_tokens = tile.row_end - tile.row_begin, tile.token_end - tile.token_begin
    return flat[begin:end].reshape(num_rows, num_tokens, *rows.shape[2:])


def _check(rows: NDArray[Any], slot_ids: NDArray[np.int64], slab: memoryview) -> int:
    """Bytes of one token of one row.

    Raises ValueError unless the slab is as large as the range, IndexError for a wrong slot.
    """
    row_token_bytes = rows.shape[2] * rows.shape[3] * rows.itemsize
    expected = len(rows) * len(slot_ids) * row_token_bytes
    if slab.nbytes != expected or expected == 0:
        raise ValueError(f"slab holds {slab.nbytes} bytes, the range {expected}")
    if slot_ids.min() < 0 or slot_ids.max() >= rows.shape[1]:
        raise IndexError(f"a slot is outside the cache of {rows.shape[1]}")
    return row_token_bytes
