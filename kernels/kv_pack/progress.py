"""How far a slab is filled, for who scatters it meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

WORD_BYTES = 64
"""A word has a cache line of its own: two sides look at it in turns."""


def progress_words(memory: memoryview) -> list[memoryview]:
    """The words of the slabs of a link, each of 8 bytes, in as many times ``WORD_BYTES``."""
    return [memory[at : at + 8] for at in range(0, len(memory), WORD_BYTES)]


@dataclass(frozen=True, slots=True)
class Progress:
    """A word of memory that both sides of a link share; see ``progress.h``. A peer may write
    anything there: it decides when bytes are read, and digests decide what they are worth.
    """

    word: memoryview
    """Its 8 bytes, at a multiple of 8."""
    grant: int
    """What the slab is used for, [0, 2**44); what another use left in the word counts for nothing.
    """
    patience_s: float = 0.0
    """Without a tile for so long, who follows gives up."""
