"""The plot of rate over message size."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.bench.plot import Axis, Points, svg


def rate_plot(title: str, lines: Mapping[str, Points], dashed: frozenset[str] = frozenset()) -> str:
    """One line of (bytes, GB/s) per name; those in ``dashed`` are bounds."""
    axes = (Axis("bytes of one transfer", 4, _size), Axis("GB/s", 2, "{:.3g}".format))
    return svg(title, lines, axes, dashed)


def _size(nbytes: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.3g} {unit}"
    return f"{nbytes:.3g} B"
