"""Gather KV out of the paged cache into a slab, and scatter a slab back, on the CPU.

Shapes: slots [num_layers, 2, num_slots, num_heads, head_dim] (a view of the paged cache), slot_ids
[num_tokens] int64, slab: flat bytes of [layers, 2, tokens, heads, head_dim]. Both return one digest
per tile.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
    rows = _rows(slots, layers, heads)
    row_token_bytes = _check(rows, slot_ids, slab)
    out = torch.frombuffer(slab, dtype=slots.dtype)
    digests = []
    for number, tile in enumerate(tiles(rows.shape[0], slot_ids.numel(), row_token_bytes)):
        begin, end = tile.offset // out.itemsize, (tile.offset + tile.nbytes) // out.itemsize
        part = out[begin:end].view(_shape(tile, rows))
        ids = slot_ids[tile.token_begin : tile.token_end]
        torch.index_select(rows[tile.row_begin : tile.row_end], 1, ids, out=part)
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
    rows = _rows(slots, layers, heads)
    row_token_bytes = _check(rows, slot_ids, slab)
    # numpy writes by index four times as fast as torch; integers stand in for types it lacks.
    word = _WORDS[slots.itemsize]
    target, ids = rows.view(word).numpy(), slot_ids.numpy()
    source = torch.frombuffer(slab, dtype=word).numpy()
    digests = []
    for number, tile in enumerate(tiles(rows.shape[0], slot_ids.numel(), row_token_bytes)):
        begin, end = tile.offset // word.itemsize, (tile.offset + tile.nbytes) // word.itemsize
        private = source[begin:end].copy()
        digests.append(digest(number, memoryview(private).cast("B")))
        part = ids[tile.token_begin : tile.token_end]
        target[tile.row_begin : tile.row_end, part] = private.reshape(_shape(tile, rows))
    return digests


def _rows(slots: torch.Tensor, layers: tuple[int, int], heads: tuple[int, int]) -> torch.Tensor:
    """View of the range as [2 * layers, num_slots, heads, head_dim]."""
    part = slots[layers[0] : layers[1]]
    return part.view(-1, *slots.shape[2:])[:, :, heads[0] : heads[1]]


def _shape(tile: Tile, rows: torch.Tensor) -> tuple[int, ...]:
    return (
        tile.row_end - tile.row_begin,
        tile.token_end - tile.token_begin,
        rows.shape[2],
        rows.shape[3],
    )


def _check(rows: torch.Tensor, slot_ids: torch.Tensor, slab: memoryview) -> int:
    """Bytes of one token of one row. Raises ValueError unless the slab is as large as the range."""
    row_token_bytes: int = rows.shape[2] * rows.shape[3] * rows.itemsize
    expected = rows.shape[0] * slot_ids.numel() * row_token_bytes
    if slab.nbytes != expected or expected == 0:
        raise ValueError(f"slab holds {slab.nbytes} bytes, the range {expected}")
    if int(slot_ids.min()) < 0 or int(slot_ids.max()) >= rows.shape[1]:
        raise IndexError(f"a slot is outside the cache of {rows.shape[1]}")
    return row_token_bytes
