"""How far a slab is filled, for who scatters it meanwhile."""

from __future__ import annotations

import time
from dataclasses import dataclass

TILE_BITS = 20
_SPINS = 100
_NAP_S = 5e-5

WORD_BYTES = 64
"""A word has a cache line of its own: two sides look at it in turns."""


def progress_words(memory: memoryview) -> list[memoryview]:
    """The words of the slabs of a link, each of 8 bytes, in as many times ``WORD_BYTES``."""
    return [memory[at : at + 8] for at in range(0, len(memory), WORD_BYTES)]


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
    """A word of memory that both share, 8 bytes at a multiple of 8; or what the bytes go over."""
    grant: int
    """What the slab is used for, [0, 2**44); what another use left in the word counts for nothing.
    """
    patience_s: float = 0.0
    """Without a tile for so long, who follows gives up."""

    def tell_filled(self, num_tiles: int) -> None:
        """As in ``progress.h``, for numpy. A processor that reorders stores may show this one
        before the last bytes of its tile: then digests differ, and the slab is scattered again.
        Over a connection it is silent: the bytes leave when the slab is full.
        """
        if isinstance(self.by, memoryview):
            self.by.cast("Q")[0] = self.grant << TILE_BITS | num_tiles

    def wait_filled(self, num_tiles: int) -> bool:
        """Whether so many tiles are filled within the patience. Other threads run meanwhile.
        Nothing comes over a connection meanwhile.
        """
        if isinstance(self.by, Stream):
            return False
        word = self.by.cast("Q")
        for _ in range(_SPINS):
            if self._is_filled(word[0], num_tiles):
                return True
            time.sleep(0)
        deadline_s = time.monotonic() + self.patience_s
        while time.monotonic() < deadline_s:
            time.sleep(_NAP_S)
            if self._is_filled(word[0], num_tiles):
                return True
        return False

    def _is_filled(self, word: int, num_tiles: int) -> bool:
        grant, filled = divmod(word, 1 << TILE_BITS)
        return grant == self.grant and filled >= num_tiles
