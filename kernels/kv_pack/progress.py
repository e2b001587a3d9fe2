"""How far a slab is filled, for who scatters it meanwhile."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

TILE_BITS = 20
_SPINS = 100
_NAP_S = 5e-5

WORD_BYTES = 512
"""A word and the digests after it have cache lines of their own: two sides look at them in turns.
"""
_WORD = struct.Struct("Q")
MOST_SEALED = WORD_BYTES // _WORD.size - 1
"""Tiles of a slab that there is room for a digest of."""


def progress_words(memory: memoryview) -> list[memoryview]:
    """The words of the slabs of a link, in as many times ``WORD_BYTES``."""
    return [memory[at : at + WORD_BYTES] for at in range(0, len(memory), WORD_BYTES)]


@dataclass(slots=True)
class Stream:
    """A connection that the bytes of a slab go or come over while it is packed or scattered."""

    fd: int
    """Of a stream socket."""
    moved: int = 0
    """Bytes of the slab, so far; in order."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How who fills a slab and who scatters it meanwhile know of each other; see ``progress.h``.
    What a peer says decides when bytes are read, and digests decide what they are worth.
    """

    by: memoryview | Stream
    """A word of memory that both share, 8 bytes at a multiple of 8, and room for digests after it;
    or what the bytes go over.
    """
    grant: int
    """What the slab is used for, [0, 2**44); what another use left in the word counts for nothing.
    """
    patience_s: float = 0.0
    """Without a tile for so long, who follows gives up."""
    has_seal: bool = False
    """Who follows waits for a seal too, as for another tile, but gives nothing up without it."""

    def tell_filled(self, num_tiles: int) -> None:
        """As in ``progress.h``, for numpy. A processor that reorders stores may show this one
        before the last bytes of its tile: then digests differ, and the slab is scattered again.
        Over a connection it is silent: the bytes leave when the slab is full.
        """
        if isinstance(self.by, memoryview):
            _WORD.pack_into(self.by, 0, self.grant << TILE_BITS | num_tiles)

    def can_seal(self, num_tiles: int) -> bool:
        """Whether the digests of so many tiles have room beside the word."""
        return isinstance(self.by, memoryview) and len(self.by) >= _WORD.size * (num_tiles + 1)

    def seal(self, digests: Sequence[int]) -> None:
        """All is filled and holds: who follows may compare its digests with these. A seal counts as
        one tile more than there are. There must be room: see ``can_seal``.
        """
        assert isinstance(self.by, memoryview)
        struct.pack_into(f"{len(digests)}Q", self.by, _WORD.size, *digests)
        self.tell_filled(len(digests) + 1)

    def is_sealed_with(self, digests: Sequence[int]) -> bool:
        """Whether the slab is sealed now, with these digests."""
        if isinstance(self.by, Stream) or not self.can_seal(len(digests)):
            return False
        word, *sealed = struct.unpack_from(f"{len(digests) + 1}Q", self.by)
        return word == self.grant << TILE_BITS | len(digests) + 1 and sealed == list(digests)

    def wait_filled(self, num_tiles: int) -> bool:
        """Whether so many tiles are filled within the patience. Other threads run meanwhile.
        Nothing comes over a connection meanwhile.
        """
        if isinstance(self.by, Stream):
            return False
        for _ in range(_SPINS):
            if self.is_filled(num_tiles):
                return True
            time.sleep(0)
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            time.sleep(_NAP_S)
            if self.is_filled(num_tiles):
                return True
        return False

    def is_filled(self, num_tiles: int) -> bool:
        """Whether the word says so now."""
        if isinstance(self.by, Stream):
            return False
        (word,) = _WORD.unpack_from(self.by)
        return bool(word >> TILE_BITS == self.grant and word % (1 << TILE_BITS) >= num_tiles)
