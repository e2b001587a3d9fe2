"""Stop strings in a stream of text pieces of any size.

NOTE: one Knuth-Morris-Pratt automaton per stop string reads the text once, character by character.
Its state is the length of the longest prefix of the stop string that the text ends with, so the
largest state over all stop strings is exactly what must be held back, and the outcome does not
depend on how the text was cut into pieces. The match that ends first wins; of several that end at
one character, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Releases text that can no longer be part of a match; O(stop strings) per character."""

    __slots__ = ("_borders", "_held", "_states", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to release, the stop string that matched or None). After a match, feed no more."""
        if not self._stops:
            return text, None
        for end, char in enumerate(text, start=1):
            matched = self._step(char)
            if matched is not None:
                seen = self._held + text[:end]
                self._held = ""
                return seen[: len(seen) - len(matched)], matched
        seen = self._held + text
        keep = len(seen) - max(self._states)
        self._held = seen[keep:]
        return seen[:keep], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _step(self, char: str) -> str | None:
        matched: str | None = None
        for i, stop in enumerate(self._stops):
            state = self._states[i]
            while state and stop[state] != char:
                state = self._borders[i][state - 1]
            if stop[state] == char:
                state += 1
            if state == len(stop):
                if matched is None or len(stop) > len(matched):
                    matched = stop
                state = self._borders[i][state - 1]
            self._states[i] = state
        return matched


def _borders(stop: str) -> tuple[int, ...]:
    """Per prefix of ``stop``: length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return tuple(borders)
