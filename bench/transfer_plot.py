"""A plot of rate over message size, as an SVG file: both axes by powers.

Drawn by hand: some hundred lines of text need no plotting library, and a page on any forge shows
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 36, 48
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8b5a2b")
"""Told apart by most colour-blind readers; the first six are Okabe and Ito's."""
STYLE = "font-family:sans-serif;font-size:12px"

Points = Sequence[tuple[float, float]]
"""(bytes, GB/s), by size."""


def svg(title: str, lines: Mapping[str, Points], dashed: frozenset[str] = frozenset()) -> str:
    """One line per name; those in ``dashed`` are bounds. Raises ValueError without a point."""
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("nothing to plot")
    x = _Axis([size for size, _ in points], LEFT, WIDTH - RIGHT, base=4)
    y = _Axis([rate for _, rate in points], HEIGHT - BOTTOM, TOP, base=2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" style="{STYLE}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">{escape(title)}</text>',
        *_grid(x, y),
    ]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        parts += _line(line, x, y, colour, name in dashed)
        at = TOP + 12 + 18 * number
        parts.append(
            f'<text x="{WIDTH - RIGHT + 16}" y="{at}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Places of values along one axis, by powers of ``base``."""

    def __init__(self, values: Sequence[float], begin: float, end: float, base: int) -> None:
        self._base = base
        self._low = math.floor(math.log(min(values), base) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log(max(values), base) - 1e-9))
        self._begin, self._end = begin, end

    def place(self, value: float) -> float:
        part = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._begin + part * (self._end - self._begin)

    def ticks(self) -> list[float]:
        return [float(self._base) ** power for power in range(self._low, self._high + 1)]


def _grid(x: _Axis, y: _Axis) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for size in x.ticks():
        at = x.place(size)
        yield f'<path d="M{at:.1f} {TOP}V{bottom}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{_size(size)}</text>'
    for rate in y.ticks():
        at = y.place(rate)
        yield f'<path d="M{LEFT} {at:.1f}H{right}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{rate:.3g}</text>'
    middle = (LEFT + right) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">bytes of one transfer</text>'
    yield f'<text x="{LEFT - 48}" y="{TOP - 8}">GB/s</text>'


def _line(points: Points, x: _Axis, y: _Axis, colour: str, dashed: bool) -> Iterator[str]:
    places = [(x.place(size), y.place(rate)) for size, rate in points]
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    for across, up in places:
        yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>'


def _size(nbytes: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes:.3g} B"
