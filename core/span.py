"""Half-open ranges, and how a count of things is shared out among ranks."""

from __future__ import annotations

from typing import NamedTuple


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

    def common(self, other: Span) -> Span:
        """What both have; its length is 0 when that is nothing."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def relative_to(self, origin: int) -> Span:
        return Span(self.begin - origin, self.end - origin)

    def times(self, size: int) -> Span:
        """The same range where each thing is ``size`` smaller ones."""
        return Span(self.begin * size, self.end * size)


def share(count: int, part: int, parts: int) -> Span:
    """Part of [0, count): sizes differ by one at most; with more parts than things, neighbours
    share one.
    """
    begin = part * count // parts
    return Span(begin, max(begin + 1, (part + 1) * count // parts))
