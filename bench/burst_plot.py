"""Inter-token latency over percentile, a line per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvferry.bench.burst_measure import Burst, percentile
from kvferry.bench.plot import Axis, Points, svg

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995)
NAMES_PX = 290


def latency_plot(found: Mapping[str, Sequence[Burst]], solid: set[str]) -> str:
    """Over the latencies of all rounds. Systems that are not in ``solid`` get dashed lines."""
    lines = {name: _points(bursts) for name, bursts in found.items()}
    axes = (
        Axis("percentile of inter-token latencies during the burst", 10, _percentile),
        Axis("ms", 2, "{:.3g}".format),
    )
    title = "Inter-token latency while a burst of long prompts is served"
    return svg(title, lines, axes, frozenset(found) - solid, NAMES_PX)


def _points(bursts: Sequence[Burst]) -> Points:
    """(1 / share of longer latencies, ms): each further nine is as wide as the one before."""
    latencies = [seconds * 1e3 for burst in bursts for seconds in burst.latencies_s]
    return [(1 / (1 - share), percentile(latencies, share)) for share in SHARES]


def _percentile(inverse: float) -> str:
    return f"{100 * (1 - 1 / inverse):.4g}"
