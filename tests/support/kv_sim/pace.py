"""How long things take: mostly little, now and then far too long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(slots=True)
class Pace:
    """Durations in virtual seconds. ``slowness`` is the chance that something takes long."""

    random: Random
    tempo: float = 1.0
    """Multiplies all that is typical in the work and on the links."""
    slowness: float = 0.0

    def session_s(self) -> float:
        return self._draw(0.001 / self.tempo, 0.4)

    def notice_s(self) -> float:
        """Until one end of a broken connection notices."""
        return self._draw(0.01 / self.tempo, 1.5)

    def link_s(self) -> float:
        return self._draw(0.0005, 0.4)

    def step_s(self) -> float:
        return self._draw(0.004, 0.5)

    def copy_s(self) -> float:
        """Of a pack or a scatter, before or after the bytes move."""
        return self._draw(0.001, 0.5)

    def dial_s(self) -> float:
        return self._draw(0.002, 0.5)

    def _draw(self, typical: float, long: float) -> float:
        draw = self.random.random()
        if draw < self.slowness:
            return long * self.random.random()
        return typical * self.tempo * draw * 2
