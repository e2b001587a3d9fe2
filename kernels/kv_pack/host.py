"""Gather and scatter on the CPU: the slabs of ``reference``, in host memory.

The copies are numpy's: they let other threads run, and unlike torch's they start no team of threads
beside the one that the model computes with. Bytes stand in for the types that numpy lacks. torch
converts element types, in pieces too small for a team.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.kernels.kv_layer import QUANTISED_TYPES, dequantised, quantised
from kvferry.kernels.kv_pack.host_digest import Bytes, TileDigests
from kvferry.kernels.kv_pack.slab import KvSlots, Range, SlabShape, Tokens
from kvferry.kernels.kv_pack.tiles import Tile, tiles

PIECE = 1 << 15
"""Elements: torch converts so many, or fewer, in the thread that asks."""


def host_shape(
    kv: KvSlots, tokens: Tokens, layers: Range, heads: Range, wire: torch.dtype
) -> SlabShape:
    """The slab of a token range. Raises ValueError for a range that is not in the cache."""
    num_layers, _, _, num_heads, head_dim = kv.elements.shape
    for name, (begin, end), count in (
        ("layers", layers, num_layers),
        ("heads", heads, num_heads),
        ("tokens", (tokens.begin, tokens.end), len(tokens.blocks) * tokens.block_size),
    ):
        if not 0 <= begin < end <= count:
            raise ValueError(f"{name}: [{begin}, {end}) is not within [0, {count})")
    if wire in QUANTISED_TYPES and head_dim % 4:
        raise ValueError(f"wire: {head_dim} of {wire} are no whole 32-bit words")
    num_rows, num_heads = 2 * (layers[1] - layers[0]), heads[1] - heads[0]
    return SlabShape(
        rows=num_rows, tokens=tokens.count, heads=num_heads, head_dim=head_dim, dtype=wire
    )


def gather(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: memoryview,
    digests: TileDigests,
) -> list[int]:
    """Fill ``slab`` with a token range of a layer and head range, in the type ``wire``; the digest
    of each tile, made while its bytes are hot.

    Raises ValueError for what does not fit, IndexError for a block outside the cache.
    """
    view = _SlabView(host_shape(kv, tokens, layers, heads, wire), slab)
    rows = _Rows(kv, layers, heads)
    slots = _slots(kv, tokens)
    for tile in view.tiles():
        elements, scales = view.elements(tile), view.scales(tile)
        where = slots[tile.token_begin : tile.token_end]
        if rows.dtype is wire:
            _take(rows.elements[tile.row_begin : tile.row_end], where, elements)
            if scales.size:
                _take(rows.scales[tile.row_begin : tile.row_end], where, scales)
        else:
            rows.read(tile, where, wire, elements, scales)
        digests.add(tile, _flat(elements), _flat(scales))
    return digests.finish()


def scatter(
    kv: KvSlots,
    tokens: Tokens,
    layers: Range,
    heads: Range,
    wire: torch.dtype,
    slab: memoryview,
    digests: TileDigests,
) -> list[int]:
    """Write ``slab`` into a token range of a layer and head range, in the cache's type; the digest
    of each tile, of the very bytes written.

    A peer that shares the slab may change it at any moment, so each tile is first copied to private
    memory, and digest and write both read that copy. Raises as ``gather`` does.
    """
    view = _SlabView(host_shape(kv, tokens, layers, heads, wire), slab)
    rows = _Rows(kv, layers, heads)
    slots = _slots(kv, tokens)
    for tile in view.tiles():
        elements, scales = view.elements(tile).copy(), view.scales(tile).copy()
        digests.add(tile, _flat(elements), _flat(scales))
        where = slots[tile.token_begin : tile.token_end]
        if rows.dtype is wire:
            rows.elements[tile.row_begin : tile.row_end, where] = elements
            if scales.size:
                rows.scales[tile.row_begin : tile.row_end, where] = scales
        else:
            rows.write(tile, where, wire, elements, scales)
    return digests.finish()


class _SlabView:
    """A slab by its tiles: bytes of elements [rows, tokens, h, D * itemsize], and float32 scales
    [rows, tokens, h], of size 0 in a float type.
    """

    def __init__(self, shape: SlabShape, slab: memoryview) -> None:
        if slab.nbytes != shape.nbytes:
            raise ValueError(f"slab: holds {slab.nbytes} bytes, the range {shape.nbytes}")
        self._shape = shape
        flat = np.frombuffer(slab, np.uint8)
        head_bytes = shape.head_dim * shape.dtype.itemsize
        self._token_bytes = shape.heads * head_bytes
        self._elements = flat[: shape.elements_nbytes].reshape(-1, shape.heads, head_bytes)
        self._scales = flat[shape.elements_nbytes :].view(np.float32).reshape(-1, shape.heads)

    def tiles(self) -> Iterator[Tile]:
        return tiles(self._shape.rows, self._shape.tokens, self._token_bytes)

    def elements(self, tile: Tile) -> Bytes:
        return self._part(self._elements, tile)

    def scales(self, tile: Tile) -> NDArray[np.float32]:
        if not self._scales.size:
            return self._scales
        return self._part(self._scales, tile)

    def _part(self, values: NDArray[Any], tile: Tile) -> NDArray[Any]:
        """A tile's token rows, which lie side by side."""
        num_rows, num_tokens = tile.row_end - tile.row_begin, tile.token_end - tile.token_begin
        begin = tile.row_begin * self._shape.tokens + tile.token_begin
        part = values[begin : begin + num_rows * num_tokens]
        return part.reshape(num_rows, num_tokens, *values.shape[1:])


class _Rows:
    """A layer and head range of the cache, row by row (K and V of each layer in turn)."""

    def __init__(self, kv: KvSlots, layers: Range, heads: Range) -> None:
        self.dtype = kv.elements.dtype
        part = kv.elements[layers[0] : layers[1]].flatten(0, 1)
        self._typed = part[:, :, heads[0] : heads[1]]
        as_bytes: Bytes = part.view(torch.uint8).numpy()
        self.elements = as_bytes[:, :, heads[0] : heads[1]]
        """[rows, slots, h, D * itemsize]"""
        self.scales: NDArray[np.float32] = np.empty(0, np.float32)
        """[rows, slots, h], of size 0 in a float type"""
        if kv.scales is not None:
            scales = kv.scales[layers[0] : layers[1]].flatten(0, 1)
            self.scales = scales[:, :, heads[0] : heads[1]].numpy()

    def read(
        self,
        tile: Tile,
        slots: NDArray[np.int64],
        wire: torch.dtype,
        elements: Bytes,
        scales: NDArray[np.float32],
    ) -> None:
        """Convert a tile to ``wire``. elements, scales: the tile in the slab."""
        for row, piece in self._pieces(tile, len(slots)):
            ids = torch.from_numpy(slots[piece])
            scale = None
            if self.scales.size:
                scale = torch.from_numpy(self.scales[row][slots[piece]])
            values, scale = _converted(self._typed[row][ids], scale, wire)
            inside = row - tile.row_begin
            elements[inside, piece] = values.view(torch.uint8).numpy()
            if scale is not None:
                scales[inside, piece] = scale.numpy()

    def write(
        self,
        tile: Tile,
        slots: NDArray[np.int64],
        wire: torch.dtype,
        elements: Bytes,
        scales: NDArray[np.float32],
    ) -> None:
        """Convert a tile from ``wire``; the reverse of ``read``."""
        for row, piece in self._pieces(tile, len(slots)):
            inside = row - tile.row_begin
            values = torch.from_numpy(elements[inside, piece]).view(wire)
            scale = torch.from_numpy(scales[inside, piece]) if scales.size else None
            values, scale = _converted(values, scale, self.dtype)
            self.elements[row, slots[piece]] = values.view(torch.uint8).numpy()
            if scale is not None:
                self.scales[row, slots[piece]] = scale.numpy()

    def _pieces(self, tile: Tile, num_tokens: int) -> Iterator[tuple[int, slice]]:
        """Rows of a tile, each in runs of tokens that torch converts without a team."""
        length = max(1, PIECE // (self._typed.shape[2] * self._typed.shape[3]))
        for row in range(tile.row_begin, tile.row_end):
            for begin in range(0, num_tokens, length):
                yield row, slice(begin, min(begin + length, num_tokens))


def _converted(
    x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Elements [..., h, D] and scales [..., h] in another type."""
    values = x if scale is None else dequantised(x, scale)
    return quantised(values, dtype) if dtype in QUANTISED_TYPES else (values.to(dtype), None)


def _slots(kv: KvSlots, tokens: Tokens) -> NDArray[np.int64]:
    """[tokens] slots of a token range. Raises IndexError for a block outside the cache."""
    position = np.arange(tokens.begin, tokens.end, dtype=np.int64)
    blocks = tokens.blocks.numpy()[position // tokens.block_size].astype(np.int64)
    if blocks.min() < 0 or (blocks.max() + 1) * tokens.block_size > kv.num_slots:
        raise IndexError(f"tokens.blocks: a block is outside the cache of {kv.num_slots} slots")
    return blocks * tokens.block_size + position % tokens.block_size


def _take(rows: NDArray[Any], slots: NDArray[np.int64], out: NDArray[Any]) -> None:
    if rows.flags.c_contiguous:
        # The slots are checked, so clip changes none; it spares numpy a copy of the result.
        np.take(rows, slots, axis=1, out=out, mode="clip")
    else:
        out[...] = rows[:, slots]


def _flat(values: NDArray[Any]) -> Bytes:
    return values.reshape(-1).view(np.uint8)
