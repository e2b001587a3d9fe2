"""A receiver's slab memory: one fixed pool per rank, counted in slabs.

A slab is memory of one link for as long as the link lives, since its peer may write to it. So the
pool is shared out when links open: each gets its share by the number of links to be expected, but
never more than half of what is left, so that there is room for links that nobody expected. When
nothing is left, a link gives its memory back: the one that has been idle for longest, else the one
that has most. Its sender opens another one, at once if it has something to send. So there may be as
many links as there are slabs, each with one at least.
"""

from __future__ import annotations

MAX_SLABS_PER_LINK = 64


class StagingPool:
    """Slabs not given out. Not thread-safe."""

    def __init__(self, num_slabs: int, expected_links: int) -> None:
        self._share = min(MAX_SLABS_PER_LINK, max(1, num_slabs // expected_links))
        self._free = num_slabs

    @property
    def num_free(self) -> int:
        return self._free

    def take(self) -> int:
        """Slabs for a new link; 0 when there are none."""
        num_slabs = min(self._share, -(-self._free // 2))
        self._free -= num_slabs
        return num_slabs

    def give_back(self, num_slabs: int) -> None:
        self._free += num_slabs
