"""Which bytes go in which slab: pure functions of the two layouts and a token range.

A slab holds [layers, 2, tokens, heads, head_dim]. Short ranges put several layers in a slab, long
ones cut one layer's tokens into several slabs. Block sizes play no part: each side finds slots by
its own block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.core.errors import TransferFailed
from kvferry.kv_transfer.layout import KvLayout


class Span(NamedTuple):
    """The half-open range [begin, end)."""

    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin

    def overlaps(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end

    def within(self, other: Span) -> bool:
        return other.begin <= self.begin < self.end <= other.end


@dataclass(frozen=True, slots=True)
class SlabMove:
    """The part of a transfer that travels in one slab."""

    index: int
    layers: Span
    heads: Span
    tokens: Span
    nbytes: int

    def overlaps(self, other: SlabMove) -> bool:
        """Whether both would write the same element."""
        return (
            self.layers.overlaps(other.layers)
            and self.heads.overlaps(other.heads)
            and self.tokens.overlaps(other.tokens)
        )


def check_compatible(source: KvLayout, target: KvLayout) -> None:
    """Raises TransferFailed naming the first difference that a transfer cannot bridge."""
    for name in ("num_layers", "num_kv_heads", "head_dim", "dtype"):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            raise TransferFailed(
                f"KV layouts differ: {name} is {ours} on the sender, {theirs} on the receiver"
            )


def slab_nbytes(layout: KvLayout, layers: Span, heads: Span, tokens: Span) -> int:
    """Bytes of one slab."""
    return layers.length * 2 * tokens.length * heads.length * layout.head_bytes


def plan_slabs(
    source: KvLayout, target: KvLayout, tokens: Span, slab_bytes: int
) -> tuple[SlabMove, ...]:
    """Cut a token range into slabs of at most, and near, ``slab_bytes``.

    No slab is smaller than a third of ``slab_bytes`` unless the whole range is. Raises
    TransferFailed for layouts that a transfer cannot bridge or a slab too small for one token of
    one layer.
    """
    check_compatible(source, target)
    if tokens.length <= 0:
        return ()
    layer_token_bytes = source.layer_token_bytes
    if layer_token_bytes > slab_bytes:
        raise TransferFailed(
            f"one token of one layer has {layer_token_bytes} bytes, a slab only {slab_bytes}"
        )
    heads = Span(0, source.num_kv_heads)
    layers_per_slab = max(1, slab_bytes // (tokens.length * layer_token_bytes))
    tokens_per_slab = slab_bytes // layer_token_bytes
    moves: list[SlabMove] = []
    for layers in _split(Span(0, source.num_layers), layers_per_slab):
        for part in _split(tokens, tokens_per_slab):
            nbytes = slab_nbytes(source, layers, heads, part)
            moves.append(SlabMove(len(moves), layers, heads, part, nbytes))
    return tuple(moves)


def _split(span: Span, longest: int) -> Iterator[Span]:
    """The fewest parts of at most ``longest``, equal to within one."""
    count = -(-span.length // longest)
    for part in range(count):
        yield Span(
            span.begin + span.length * part // count, span.begin + span.length * (part + 1) // count
        )


@dataclass(slots=True)
class Coverage:
    """Which part of a transfer has arrived; whatever the order and the cut of its slabs."""

    layout: KvLayout
    tokens: Span
    moves: dict[int, SlabMove] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def expected_nbytes(self) -> int:
        return self.tokens.length * self.layout.token_bytes

    @property
    def complete(self) -> bool:
        return self.nbytes == self.expected_nbytes

    def fault(self, move: SlabMove) -> str | None:
        """Why a move cannot be part of this transfer; None when it can."""
        layers, heads = Span(0, self.layout.num_layers), Span(0, self.layout.num_kv_heads)
        if not (
            move.layers.within(layers)
            and move.heads.within(heads)
            and move.tokens.within(self.tokens)
        ):
            return "range outside the transfer"
        if move.nbytes != slab_nbytes(self.layout, move.layers, move.heads, move.tokens):
            return "size does not fit the range"
        if any(move.overlaps(other) for other in self.moves.values()):
            return "range overlaps another slab"
        return None

    def add(self, move: SlabMove) -> None:
        """Count a move, checked by ``fault``, as arrived."""
        self.moves[move.index] = move
        self.nbytes += move.nbytes
