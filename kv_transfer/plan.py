"""Who sends what to whom, and which bytes go in which slab: pure functions of two layouts.

1. ``parts``: what one rank of the sender owes one rank of the receiver.
2. ``Cutter``: as a part becomes ready, layer by layer or all at once, cut it into slabs.
3. ``Coverage``: what has arrived, whatever the order and the cut.

A slab holds [layers, 2, tokens, heads, head_dim] in the wire's element type, then the scales of a
quantised one. Block sizes play no part: each side finds slots by its own block table.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isqrt

import msgspec

from kvferry.core.errors import TransferFailed
from kvferry.core.span import Span
from kvferry.kv_transfer.layout import ELEMENT_BYTES, QUANTISED_BYTES, KvLayout, Shard

LEAST_SLAB_BYTES = 256 * 1024
"""No slab is smaller where the part has as many; a third of ``slab_bytes`` if that is less."""
SLAB_COST_BYTES = 1024 * 1024
"""What a slab costs by itself, in bytes copied meanwhile."""
WORD_BYTES = 4


class SlabMove(msgspec.Struct, frozen=True):
    """The part of a transfer that travels in one slab. Layers and heads as the model numbers
    them.
    """

    index: int
    layers: Span
    heads: Span
    tokens: Span
    nbytes: int


def check_compatible(source: KvLayout, target: KvLayout) -> None:
    """Raises TransferFailed naming the first difference that a transfer cannot bridge."""
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise TransferFailed(
                f"KV layouts differ: {name} is {ours} on the sender, {theirs} on the receiver"
            )


def wire_dtype(source: KvLayout, target: KvLayout, forced: str | None = None) -> str:
    """Element type of the slabs: ``forced``, else the narrower of the two caches' types.

    Of two equally narrow types it is the sender's. Raises TransferFailed for a conversion that is
    not made: out of a quantised cache into another type, of an unknown type, or of heads that leave
    their scales across 32-bit words.
    """
    narrower = min((source.dtype, target.dtype), key=lambda dtype: ELEMENT_BYTES[dtype])
    wire = forced or narrower
    if wire not in ELEMENT_BYTES:
        raise TransferFailed(f"KV type on the wire {wire!r} is none of {', '.join(ELEMENT_BYTES)}")
    if source.dtype in QUANTISED_BYTES and (wire, target.dtype) != (source.dtype, source.dtype):
        raise TransferFailed(f"KV of {source.dtype} is not converted to {wire}, {target.dtype}")
    if wire in QUANTISED_BYTES and source.head_dim % WORD_BYTES:
        raise TransferFailed(f"KV heads of {source.head_dim} are not sent as {wire}")
    return wire


def parts(
    source: KvLayout, source_rank: int, target: KvLayout, target_rank: int
) -> tuple[Shard, ...]:
    """What a rank of the sender owes a rank of the receiver, in the model's numbering.

    Over all sender's ranks the parts of a receiver's rank are its shard, each element once. Where
    several of the sender's ranks hold a head, its receivers are spread over them. Raises
    TransferFailed for layouts that a transfer cannot bridge.
    """
    check_compatible(source, target)
    ours, theirs = source.shard(source_rank), target.shard(target_rank)
    layers = ours.layers.common(theirs.layers)
    heads = [
        head
        for head in range(*ours.heads.common(theirs.heads))
        if _owner(source, target, target_rank, head) == source_rank % source.tp
    ]
    if not layers.length or not heads:
        return ()
    # Without a gap: a rank of the sender that shares heads with others holds but one.
    return (Shard(layers, Span(heads[0], heads[-1] + 1)),)


def _owner(source: KvLayout, target: KvLayout, target_rank: int, head: int) -> int:
    """The sender's tensor-parallel rank that sends a head to a receiver's rank."""
    holders, takers = _holders(source, head), _holders(target, head)
    turn = takers.index(target_rank % target.tp)
    return holders[turn * len(holders) // len(takers)]


def _holders(layout: KvLayout, head: int) -> list[int]:
    """Tensor-parallel ranks that hold a head."""
    shards = ((rank, layout.shard(rank).heads) for rank in range(layout.tp))
    return [rank for rank, heads in shards if heads.begin <= head < heads.end]


def slab_nbytes(head_bytes: int, layers: Span, heads: Span, tokens: Span) -> int:
    """Bytes of one slab. ``head_bytes``: of the wire's type, scale included."""
    return layers.length * 2 * tokens.length * heads.length * head_bytes


def best_slab_bytes(nbytes: int, slab_bytes: int, is_followed: bool = False) -> int:
    """The size of slabs, ``slab_bytes`` at most, that moves a transfer of ``nbytes`` soonest.

    The receiver is one slab behind the sender: s bytes, and n slabs cost ``SLAB_COST_BYTES`` each,
    with n s = nbytes. Not so small that parts of it would be below ``LEAST_SLAB_BYTES``. A receiver
    that scatters slabs while they are filled is never so far behind, so the fewest are best.
    """
    if is_followed:
        return slab_bytes
    return min(slab_bytes, max(3 * LEAST_SLAB_BYTES, isqrt(nbytes * SLAB_COST_BYTES)))


def cut(
    part: Shard, tokens: Span, head_bytes: int, slab_bytes: int, first_index: int = 0
) -> list[SlabMove]:
    """Cut a region into slabs of at most, and near, ``slab_bytes``, numbered from ``first_index``.

    No slab is smaller than a third of ``slab_bytes`` unless the whole region is. Raises
    TransferFailed for a slab too small for one token of one layer.
    """
    if tokens.length <= 0 or part.layers.length <= 0:
        return []
    layer_token_bytes = 2 * part.heads.length * head_bytes
    if layer_token_bytes > slab_bytes:
        raise TransferFailed(
            f"one token of one layer has {layer_token_bytes} bytes, a slab only {slab_bytes}"
        )
    layers_per_slab = max(1, slab_bytes // (tokens.length * layer_token_bytes))
    tokens_per_slab = slab_bytes // layer_token_bytes
    moves: list[SlabMove] = []
    for layers in _split(part.layers, layers_per_slab):
        for range_ in _split(tokens, tokens_per_slab):
            nbytes = slab_nbytes(head_bytes, layers, part.heads, range_)
            moves.append(SlabMove(first_index + len(moves), layers, part.heads, range_, nbytes))
    return moves


def _split(span: Span, longest: int) -> Iterator[Span]:
    """The fewest parts of at most ``longest``, equal to within one."""
    count = -(-span.length // longest)
    for part in range(count):
        yield Span(
            span.begin + span.length * part // count, span.begin + span.length * (part + 1) // count
        )


@dataclass(slots=True)
class Cutter:
    """Cuts a part into slabs as it becomes ready: layer by layer, chunk of tokens after chunk.

    A chunk is computed in all layers before the next one begins. Slabs wait until ``least_bytes``
    are ready, or all is: infinity sends everything at once. They wait too where the rest of the
    chunk, or of the prompt, would be left below ``LEAST_SLAB_BYTES``.
    """

    part: Shard
    tokens: Span
    head_bytes: int
    """Of the wire's type, scale included."""
    slab_bytes: int
    least_bytes: float = 0.0
    num_cut: int = 0
    """Slabs so far; their indices count on through all calls."""
    _chunk: Span = field(init=False)
    """Tokens of which some layers are ready and not cut."""
    _layer: int = field(init=False)
    """Layers of the chunk below this one are cut."""

    def __post_init__(self) -> None:
        self._chunk = Span(self.tokens.begin, self.tokens.begin)
        self._layer = self.part.layers.begin

    @property
    def nbytes(self) -> int:
        """The whole part."""
        return self.tokens.length * self.part.token_bytes(self.head_bytes)

    @property
    def complete(self) -> bool:
        """Whether all is cut."""
        return self._chunk.begin == self.tokens.end

    def advance(self, layers_end: int, tokens_end: int) -> list[SlabMove]:
        """Tokens before ``tokens_end`` are ready in layers before ``layers_end``, and those of
        earlier chunks in all layers. The slabs to send now.
        """
        moves: list[SlabMove] = []
        tokens_end = self._taken(tokens_end)
        if tokens_end > self._chunk.end:
            if self._layer > self.part.layers.begin:
                moves += self._cut_to(self.part.layers.end)
            self._chunk = Span(self._chunk.begin, tokens_end)
        layers_end = min(layers_end, self.part.layers.end)
        if self._layer < layers_end and self._chunk.length and self._is_worth_cutting(layers_end):
            moves += self._cut_to(layers_end)
        return moves

    def _taken(self, tokens_end: int) -> int:
        """Where a chunk that ends there ends here: the last tokens are kept together."""
        if tokens_end >= self.tokens.end:
            return self.tokens.end
        last = -(-self._least_slab // self.part.token_bytes(self.head_bytes))
        return min(tokens_end, self.tokens.end - last)

    def _is_worth_cutting(self, layers_end: int) -> bool:
        layer_nbytes = self._chunk.length * self.part.token_bytes(self.head_bytes)
        layer_nbytes //= self.part.layers.length
        rest = (self.part.layers.end - layers_end) * layer_nbytes
        if not rest and self._chunk.end == self.tokens.end:
            return True
        ready = (layers_end - self._layer) * layer_nbytes
        least = max(self.least_bytes, self._least_slab)
        return ready >= least and (not rest or rest >= self._least_slab)

    @property
    def _least_slab(self) -> int:
        return min(LEAST_SLAB_BYTES, self.slab_bytes // 3)

    def _cut_to(self, layers_end: int) -> list[SlabMove]:
        region = Shard(Span(self._layer, layers_end), self.part.heads)
        moves = cut(region, self._chunk, self.head_bytes, self.slab_bytes, self.num_cut)
        self.num_cut += len(moves)
        self._layer = layers_end
        if layers_end == self.part.layers.end:
            self._chunk = Span(self._chunk.end, self._chunk.end)
            self._layer = self.part.layers.begin
        return moves


class _Spans:
    """A set of numbers as its spans; those that touch are one."""

    def __init__(self) -> None:
        self._bounds: list[int] = []
        """Begin and end of each, in order: numbers between an even place and the next are in."""

    def overlaps(self, span: Span) -> bool:
        place = bisect_right(self._bounds, span.begin)
        return place % 2 == 1 or (place < len(self._bounds) and self._bounds[place] < span.end)

    def add(self, span: Span) -> None:
        """Of numbers that are not in yet."""
        begin, end = bisect_left(self._bounds, span.begin), bisect_right(self._bounds, span.end)
        self._bounds[begin:end] = [span.begin] * (begin % 2 == 0) + [span.end] * (end % 2 == 0)


@dataclass(slots=True)
class Coverage:
    """Which part of a transfer has arrived; whatever the order and the cut of its slabs."""

    shard: Shard
    """What the receiving rank holds."""
    tokens: Span
    head_bytes: int
    """Of the wire's type, scale included."""
    moves: dict[tuple[int, int], SlabMove] = field(default_factory=dict)
    """By (sender's rank, index)."""
    nbytes: int = 0
    expected_nbytes: int = field(init=False)
    _tokens: dict[int, dict[Span, _Spans]] = field(default_factory=dict)
    """By layer and head range, so that a check costs the same however much has arrived."""

    def __post_init__(self) -> None:
        self.expected_nbytes = self.tokens.length * self.shard.token_bytes(self.head_bytes)

    @property
    def complete(self) -> bool:
        return self.nbytes == self.expected_nbytes

    def fault(self, move: SlabMove) -> str | None:
        """Why a move cannot be part of this transfer; None when it can."""
        if not (
            move.layers.within(self.shard.layers)
            and move.heads.within(self.shard.heads)
            and move.tokens.within(self.tokens)
        ):
            return "range outside the transfer"
        if move.nbytes != slab_nbytes(self.head_bytes, move.layers, move.heads, move.tokens):
            return "size does not fit the range"
        if self.complete:
            return "range overlaps another slab"
        for layer in range(*move.layers) if self._tokens else ():
            for heads, arrived in self._tokens.get(layer, {}).items():
                if heads.overlaps(move.heads) and arrived.overlaps(move.tokens):
                    return "range overlaps another slab"
        return None

    def add(self, source_rank: int, move: SlabMove) -> None:
        """Count a move, checked by ``fault``, as arrived."""
        self.moves[source_rank, move.index] = move
        self.nbytes += move.nbytes
        if self.complete:
            # Nothing is left that these would tell apart.
            return
        for layer in range(*move.layers):
            by_heads = self._tokens.setdefault(layer, {})
            by_heads.setdefault(move.heads, _Spans()).add(move.tokens)
