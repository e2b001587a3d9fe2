"""What gather and scatter move: a cache, a token range in it, and a slab.

Shapes: L layers, S slots, H KV heads, D head_dim of the cache; of a slab, R rows (K and V of each
layer in turn), T tokens, h heads. Slot of token t of a sequence: ``blocks[t // B] * B + t % B``.

A slab is flat bytes: elements [R, T, h, D], then, when its type is quantised, float32 scales
[R, T, h]. Nothing lies between the two: a head has whole 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.kv_layer import FLOAT_TYPES, QUANTISED_TYPES
from kvferry.kernels.kv_pack.tiles import TileCut

WORD_BYTES = 4
MAX_POSITIONS = 1 << 30
"""Token rows of a slab, and words of one: the digest numbers both in 31 bits."""

Range = tuple[int, int]
"""Half open, [begin, end)."""


@dataclass(frozen=True, slots=True, eq=False)
class KvSlots:
    """The paged cache of one worker as the KV plane sees it: tokens in slots."""

    elements: torch.Tensor
    """[L, 2, S, H, D], contiguous."""
    scales: torch.Tensor | None = None
    """float32 [L, 2, S, H], contiguous; for int8 and FP8, and for them alone."""

    @property
    def num_slots(self) -> int:
        return self.elements.shape[2]

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def check(self) -> None:
        """Raise ValueError naming the tensor that does not fit."""
        shape, dtype = self.elements.shape, self.elements.dtype
        if len(shape) != 5 or shape[1] != 2 or not self.elements.is_contiguous():
            raise ValueError("kv.elements: must be [L, 2, S, H, D], contiguous")
        if shape[4] * dtype.itemsize % WORD_BYTES:
            raise ValueError(f"kv.elements: {shape[4]} of {dtype} are no whole 32-bit words")
        if (self.scales is not None) != (dtype in QUANTISED_TYPES):
            raise ValueError("kv.scales: must be given for int8 and FP8, and for them alone")
        if self.scales is not None and (
            self.scales.shape != shape[:4]
            or self.scales.dtype is not torch.float32
            or not self.scales.is_contiguous()
        ):
            raise ValueError(f"kv.scales: must be float32 {tuple(shape[:4])}, contiguous")


@dataclass(frozen=True, slots=True, eq=False)
class Generations:
    """What makes a block of a lease stale: both tensors of one integer type, on the cache's device.

    A block that was given away since has a higher generation; it is neither read nor written.
    """

    live: torch.Tensor
    """[num_blocks of the cache], as the block pool has them now."""
    leased: torch.Tensor
    """[len(blocks)], as they were when the lease was given."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """Tokens [begin, end) of a sequence. Slot ids are blocks of one token."""

    blocks: torch.Tensor
    """int32 or int64 [n], contiguous: the blocks of the sequence from its first token."""
    begin: int
    end: int
    block_size: int
    generations: Generations | None = None

    @property
    def count(self) -> int:
        return self.end - self.begin

    def check(self, kv: KvSlots) -> None:
        """Raise ValueError naming what does not fit."""
        if not 0 <= self.begin < self.end <= len(self.blocks) * self.block_size:
            raise ValueError(
                f"tokens: [{self.begin}, {self.end}) is not in {len(self.blocks)} blocks of "
                f"{self.block_size}"
            )
        if self.blocks.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"tokens.blocks: {self.blocks.dtype}, not int32 or int64")
        tensors = {"blocks": self.blocks}
        if self.generations is not None:
            tensors["generations.live"] = self.generations.live
            tensors["generations.leased"] = self.generations.leased
            if self.generations.live.dtype != self.generations.leased.dtype:
                raise ValueError("tokens.generations: two types")
            if self.generations.leased.shape != self.blocks.shape:
                raise ValueError("tokens.generations.leased: must be one per block")
            if len(self.generations.live) * self.block_size != kv.num_slots:
                raise ValueError("tokens.generations.live: must be one per block of the cache")
        for name, tensor in tensors.items():
            if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device != kv.device:
                raise ValueError(f"tokens.{name}: must be flat, contiguous, on {kv.device}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabShape:
    """R rows, T tokens, h heads, D head_dim and the element type of a slab."""

    rows: int
    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def head_words(self) -> int:
        """32-bit words of one head of one token of one row."""
        return self.head_dim * self.dtype.itemsize // WORD_BYTES

    @property
    def token_words(self) -> int:
        """32-bit words of one token of one row, without scales."""
        return self.heads * self.head_words

    @property
    def token_nbytes(self) -> int:
        """One token of one row, without scales."""
        return self.heads * self.head_dim * self.dtype.itemsize

    @property
    def elements_nbytes(self) -> int:
        return self.rows * self.tokens * self.token_nbytes

    @property
    def is_quantised(self) -> bool:
        return self.dtype in QUANTISED_TYPES

    @property
    def nbytes(self) -> int:
        """Bytes of the slab, scales included."""
        scales = self.rows * self.tokens * self.heads * WORD_BYTES if self.is_quantised else 0
        return self.elements_nbytes + scales

    @property
    def cut(self) -> TileCut:
        """Its tiles, by the bytes of the elements; a token's scales belong to its tile."""
        return TileCut.of(self.rows, self.tokens, self.token_nbytes)

    def elements(self, slab: torch.Tensor) -> torch.Tensor:
        """View [R, T, h, D] of the bytes of a slab."""
        flat = slab[: self.elements_nbytes].view(self.dtype)
        return flat.view(self.rows, self.tokens, self.heads, self.head_dim)

    def scales(self, slab: torch.Tensor) -> torch.Tensor | None:
        """View float32 [R, T, h]; None for a float type."""
        if not self.is_quantised:
            return None
        flat = slab[self.elements_nbytes : self.nbytes].view(torch.float32)
        return flat.view(self.rows, self.tokens, self.heads)


def slab_shape(
    kv: KvSlots, tokens: Tokens, layers: Range, heads: Range, wire: torch.dtype
) -> SlabShape:
    """The slab of a token range. Raises ValueError naming the range or type that does not fit."""
    num_layers, _, _, num_heads, head_dim = kv.elements.shape
    for name, (begin, end), count in (("layers", layers, num_layers), ("heads", heads, num_heads)):
        if not 0 <= begin < end <= count:
            raise ValueError(f"{name}: [{begin}, {end}) is not within [0, {count})")
    known = FLOAT_TYPES + QUANTISED_TYPES
    if wire is not kv.elements.dtype and not (wire in known and kv.elements.dtype in known):
        raise ValueError(f"wire: {kv.elements.dtype} is not converted to {wire}")
    if head_dim * wire.itemsize % WORD_BYTES:
        raise ValueError(f"wire: {head_dim} of {wire} are no whole 32-bit words")
    shape = SlabShape(
        rows=2 * (layers[1] - layers[0]),
        tokens=tokens.count,
        heads=heads[1] - heads[0],
        head_dim=head_dim,
        dtype=wire,
    )
    if max(shape.rows * shape.tokens, shape.heads * (shape.head_words + 1)) > MAX_POSITIONS:
        raise ValueError(f"tokens: more than {MAX_POSITIONS} token rows or columns in one slab")
    return shape


def check_slab(slab: torch.Tensor, shape: SlabShape, device: torch.device) -> None:
    """Raise ValueError unless ``slab`` holds exactly the bytes of ``shape``."""
    if slab.dtype is not torch.uint8 or slab.dim() != 1 or not slab.is_contiguous():
        raise ValueError("slab: must be flat, contiguous uint8")
    if slab.numel() != shape.nbytes:
        raise ValueError(f"slab: holds {slab.numel()} bytes, the range {shape.nbytes}")
    if slab.storage_offset() % 16:
        raise ValueError("slab: must begin at a multiple of 16 bytes")
    if slab.device != device:
        raise ValueError(f"slab: on {slab.device}, the cache on {device}")


def check_copy(kv: KvSlots, block_size: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Raise ValueError for lists that do not fit; their values are looked at on the host alone."""
    for name, blocks in (("sources", sources), ("targets", targets)):
        if blocks.dtype is not torch.int64 or blocks.dim() != 1 or not blocks.is_contiguous():
            raise ValueError(f"{name}: must be int64 [n], contiguous")
    if sources.shape != targets.shape:
        raise ValueError(f"targets: {len(targets)} for {len(sources)} sources")
    if block_size < 1 or kv.num_slots % block_size:
        raise ValueError(f"block_size: {kv.num_slots} slots are no whole blocks of {block_size}")
    if sources.device.type != "cpu" or targets.device.type != "cpu":
        return
    read, written = set(sources.tolist()), set(targets.tolist())
    if len(written) != len(targets) or read & written:
        raise ValueError("targets: must be distinct, and none a source")
    if any(not 0 <= block < kv.num_slots // block_size for block in read | written):
        raise ValueError("sources, targets: a block is outside the cache")


def whole_blocks(kv: KvSlots, block_size: int, blocks: torch.Tensor) -> tuple[Tokens, Range, Range]:
    """All tokens, layers and heads of some blocks."""
    tokens = Tokens(blocks=blocks, begin=0, end=len(blocks) * block_size, block_size=block_size)
    return tokens, (0, kv.elements.shape[0]), (0, kv.elements.shape[3])


def swap_nbytes(kv: KvSlots, block_size: int, num_blocks: int) -> int:
    """Bytes of some whole blocks of all layers, with their scales."""
    tensors = (kv.elements, *([] if kv.scales is None else [kv.scales]))
    return sum(x.nbytes // kv.num_slots for x in tensors) * block_size * num_blocks


def check_blocks(staging: torch.Tensor, host: torch.Tensor) -> None:
    """Raise ValueError unless ``host`` is host memory as large as the staging slab."""
    if host.dtype is not torch.uint8 or host.dim() != 1 or not host.is_contiguous():
        raise ValueError("host: must be flat, contiguous uint8")
    if host.device.type != "cpu" or host.numel() != staging.numel():
        raise ValueError(f"host: must be {staging.numel()} bytes of host memory")
