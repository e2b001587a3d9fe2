"""Lines over two axes by powers, as an SVG file.

Drawn by hand: some hundred lines of text need no plotting library, and a page on any forge shows
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
TOP, BOTTOM, LEFT = 36, 48, 64
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#8b5a2b")
"""Told apart by most colour-blind readers; the first six are Okabe and Ito's."""
STYLE = "font-family:sans-serif;font-size:12px"

Points = Sequence[tuple[float, float]]
"""(x, y) above 0, by x."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What one axis shows: a tick at each power of ``base``, and how its number is written."""

    title: str
    base: int
    write: Callable[[float], str]


def svg(
    title: str,
    lines: Mapping[str, Points],
    axes: tuple[Axis, Axis],
    dashed: frozenset[str] = frozenset(),
    right: int = 190,
) -> str:
    """One line per name. ``axes``: x and y. ``right``: room for the names, in pixels.

    Raises ValueError without a point.
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        raise ValueError("nothing to plot")
    x = _Scale([across for across, _ in points], LEFT, WIDTH - right, axes[0])
    y = _Scale([up for _, up in points], HEIGHT - BOTTOM, TOP, axes[1])
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
            f'<text x="{WIDTH - right + 16}" y="{at}" fill="{colour}">{escape(name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


class _Scale:
    """Places of values along one axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float, axis: Axis) -> None:
        self.axis = axis
        self.begin, self.end = begin, end
        self._low = math.floor(math.log(min(values), axis.base) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log(max(values), axis.base) - 1e-9))

    def place(self, value: float) -> float:
        part = (math.log(value, self.axis.base) - self._low) / (self._high - self._low)
        return self.begin + part * (self.end - self.begin)

    def ticks(self) -> list[float]:
        return [float(self.axis.base) ** power for power in range(self._low, self._high + 1)]


def _grid(x: _Scale, y: _Scale) -> Iterator[str]:
    for value in x.ticks():
        at, text = x.place(value), escape(x.axis.write(value))
        yield f'<path d="M{at:.1f} {y.end}V{y.begin}" stroke="#ddd"/>'
        yield f'<text x="{at:.1f}" y="{y.begin + 18}" text-anchor="middle">{text}</text>'
    for value in y.ticks():
        at, text = y.place(value), escape(y.axis.write(value))
        yield f'<path d="M{x.begin} {at:.1f}H{x.end}" stroke="#ddd"/>'
        yield f'<text x="{x.begin - 8}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
    middle = (x.begin + x.end) / 2
    yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.axis.title)}</text>'
    yield f'<text x="{x.begin - 48}" y="{y.end - 8}">{escape(y.axis.title)}</text>'


def _line(points: Points, x: _Scale, y: _Scale, colour: str, dashed: bool) -> Iterator[str]:
    places = [(x.place(across), y.place(up)) for across, up in points]
    path = "L".join(f"{across:.1f} {up:.1f}" for across, up in places)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    for across, up in places:
        yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3" fill="{colour}"/>'
