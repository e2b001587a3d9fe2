"""Which transport carries the KV to each rank of each receiver: what was measured, what is chosen,
and why not the others.

Until a rank is measured the first of ``endpoints.TRANSPORTS`` that works is taken; then the
fastest, one within the host unless the network is clearly faster, and of two about as fast the one
with the shorter round trip. A path that breaks is passed over until it has been measured again;
when all are broken, the one that broke first is tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvferry.core.errors import ConfigError, LinkRefused
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.endpoints import TRANSPORTS, Medium, Transport

SAME = 0.95
"""A path with this part of the fastest one's rate is as good."""
NETWORK_COST = 2.0
"""A path over the network takes this many times the processor time of one within a host, so it must
be faster by as much: one short measurement beside other work errs by less.
"""
MAX_RANKS = 4096
"""Ranks of receivers remembered, the newest."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way to one rank of a receiver. Plain data: a row of the matrix of all pairs."""

    peer: Incarnation
    rank: int
    endpoint: str
    transport: str
    medium: Medium
    no_means: str = ""
    """Why this process cannot use it, or must not; empty when it can."""
    broken: str = ""
    """How it broke, or why it could not be opened or measured; empty when it works."""
    num_breaks: int = 0
    """Since it last worked. All breaks are numbered by ``break_number``."""
    proven: bool = False
    """Whether a transfer went over it since it last broke."""
    break_number: int = 0
    rate: float = 0.0
    """Bytes per second of slabs filled and verified; 0: not measured."""
    peak: float = 0.0
    """Bytes per second of its medium, as measured here; 0: not measured."""
    round_trip_s: float = 0.0
    """From filling a small slab to its acknowledgement."""
    chosen: bool = False

    @property
    def why_not(self) -> str:
        """Why it cannot be used now; empty when it can."""
        return self.no_means or self.broken


class Choices:
    """The paths of one sender. Any thread may call it."""

    def __init__(
        self,
        forced: str | None = None,
        trusted_network: bool = False,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        """``forced``: the only transport allowed."""
        self._forced = forced
        self._trusted_network = trusted_network
        self._transports = transports
        self._lock = threading.Lock()
        self._num_breaks = 0
        self._ranks: dict[tuple[Incarnation, int], dict[str, Path]] = {}
        """By endpoint."""

    def check(self) -> None:
        """Raises ConfigError when the forced transport cannot be used in this process."""
        reason = "" if self._forced is None else self._no_means(self._forced)
        if reason:
            raise ConfigError("transfer.transport", f"{self._forced}: {reason}")

    def choose(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> str:
        """The endpoint to open a link over.

        Raises LinkRefused when none can be used; it names the forced transport, or each one.
        """
        with self._lock:
            paths = self._update(peer, rank, endpoints)
            best = _best(paths.values())
            if best is None:
                raise LinkRefused(self._refusal(paths.values()))
            for endpoint, path in paths.items():
                paths[endpoint] = replace(path, chosen=path is best)
        return best.endpoint

    def paths(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> list[Path]:
        """The ways to a rank, in the order of the transports."""
        with self._lock:
            return list(self._update(peer, rank, endpoints).values())

    def rows(self) -> list[Path]:
        """All that are known."""
        with self._lock:
            return [path for paths in self._ranks.values() for path in paths.values()]

    def measured(self, path: Path) -> None:
        """A path was measured, or could not be: ``broken`` says why, unless transfers prove that it
        works.
        """
        with self._lock:
            paths = self._ranks.get((path.peer, path.rank), {})
            known = paths.get(path.endpoint)
            if known is None:
                return
            if not path.broken:
                paths[path.endpoint] = replace(path, chosen=known.chosen, proven=known.proven)
            elif not known.proven:
                paths[path.endpoint] = self._break(known, path.broken)

    def failed(self, peer: Incarnation, rank: int, endpoint: str, why: str) -> Path | None:
        """A link over this endpoint broke, or could not be opened. The path, if it is known."""
        with self._lock:
            paths = self._ranks.get((peer, rank), {})
            if endpoint in paths:
                paths[endpoint] = self._break(paths[endpoint], why or "the link broke")
            return paths.get(endpoint)

    def works(self, peer: Incarnation, rank: int, endpoint: str) -> None:
        """A link over this endpoint has moved slabs."""
        with self._lock:
            paths = self._ranks.get((peer, rank), {})
            if endpoint in paths:
                paths[endpoint] = replace(paths[endpoint], broken="", num_breaks=0, proven=True)

    def has_other(self, peer: Incarnation, rank: int) -> bool:
        """Whether some path to a rank works as far as is known."""
        with self._lock:
            return any(not path.why_not for path in self._ranks.get((peer, rank), {}).values())

    def _break(self, path: Path, why: str) -> Path:
        self._num_breaks += 1
        return replace(
            path,
            broken=why,
            num_breaks=path.num_breaks + 1,
            break_number=self._num_breaks,
            proven=False,
        )

    def _update(self, peer: Incarnation, rank: int, endpoints: tuple[str, ...]) -> dict[str, Path]:
        """The paths to these endpoints; what is known of them is kept, others are forgotten."""
        known = self._ranks.pop((peer, rank), {})
        order = {name: place for place, name in enumerate(self._transports)}
        paths = {
            endpoint: known.get(endpoint) or self._new(peer, rank, endpoint)
            for endpoint in sorted(endpoints, key=lambda one: order.get(_scheme(one), len(order)))
        }
        self._ranks[peer, rank] = paths
        while len(self._ranks) > MAX_RANKS:
            del self._ranks[next(iter(self._ranks))]
        return paths

    def _new(self, peer: Incarnation, rank: int, endpoint: str) -> Path:
        name = _scheme(endpoint)
        transport = self._transports.get(name)
        medium = Medium.NETWORK if transport is None else transport.medium
        return Path(peer, rank, endpoint, name, medium, no_means=self._no_means(name))

    def _no_means(self, name: str) -> str:
        transport = self._transports.get(name)
        if transport is None:
            return "unknown here"
        if self._forced is not None and name != self._forced:
            return f"transfer.transport is {self._forced}"
        if not transport.authenticates and not self._trusted_network:
            return "needs transfer.trusted_network"
        return transport.why_not() or ""

    def _refusal(self, paths: Iterable[Path]) -> str:
        if self._forced is None:
            reasons = [f"{path.transport}: {path.why_not}" for path in paths]
            return f"no transport can be used: {'; '.join(reasons) or 'the peer offers none'}"
        reasons = [path.why_not for path in paths if path.transport == self._forced]
        reason = reasons[0] if reasons else "the peer does not offer it"
        return f"transfer.transport is {self._forced}: {reason}"


def _scheme(endpoint: str) -> str:
    return endpoint.partition(":")[0]


def _worth(path: Path) -> float:
    return path.rate / NETWORK_COST if path.medium is Medium.NETWORK else path.rate


def _best(paths: Iterable[Path]) -> Path | None:
    """The one to take, None when there are means for none. Those that are not measured come after
    those that are.
    """
    usable = [path for path in paths if not path.no_means]
    sound = [path for path in usable if not path.broken]
    if not sound:
        return min(usable, key=lambda path: path.break_number, default=None)
    most = max(_worth(path) for path in sound)
    if not most:
        return sound[0]
    close = [path for path in sound if _worth(path) >= SAME * most]
    return min(close, key=lambda path: path.round_trip_s)
