"""Rates of transports and peers over message sizes: everybody moves the same blocks, in turns."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import Interval, bootstrap_median, paired_ratio
from kvferry.bench.transfer_pair import Batch

GOAL_VS_BOUND = 0.85
GOAL_VS_PEERS = 1.0
CLAIMED_FROM = 4 << 20
"""Bytes from which on the rates are promised."""
MANY_AT_ONCE = 8
MOST_ROUNDS = 3
"""Of transfers larger than ``ROUND_BYTES``."""
ROUND_BYTES = 64 << 20
"""Of one contender and size in one round, where a transfer is no larger."""


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that moves blocks from one process to another."""

    name: str
    transfer: Callable[[int, int], Batch]
    """(tokens, count): one after the other."""
    many: Callable[[int, int], Batch] | None = None
    """The same, ``MANY_AT_ONCE``."""
    way: Callable[[int], str] = lambda tokens: ""
    """How it moves so many tokens, where it has a choice."""
    is_network: bool = False
    """Whether its bytes go through TCP, and are compared to that."""
    most_bytes: int = 1 << 60


class Cell(NamedTuple):
    contender: str
    tokens: int


@dataclass(slots=True)
class Found:
    """Of one contender at one size, round by round."""

    batches: list[Batch] = field(default_factory=list)
    """One transfer after the other."""
    many: list[Batch] = field(default_factory=list)
    """``MANY_AT_ONCE``; none where one alone keeps both sides busy."""

    def rates(self, nbytes: int) -> list[float]:
        """Bytes per second of each round's median transfer."""
        return [nbytes / statistics.median(batch.latencies_s) for batch in self.batches]

    def bandwidths(self, nbytes: int) -> list[float]:
        """Bytes per second of each round, its hand-offs hidden by other transfers."""
        return [nbytes * batch.per_s for batch in self.many] or self.rates(nbytes)

    @property
    def latencies_s(self) -> list[float]:
        return [latency for batch in self.batches for latency in batch.latencies_s]


@dataclass(slots=True)
class Sweep:
    """All that was measured."""

    nbytes: dict[int, int]
    """Tokens -> bytes."""
    found: dict[Cell, Found] = field(default_factory=dict)
    bounds: dict[int, list[float]] = field(default_factory=dict)
    """Tokens -> ``Probes.bound`` by round."""
    raw: list[float] = field(default_factory=list)
    """By round."""
    ways: dict[Cell, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Probes:
    """Limits, in bytes per second, measured between the contenders' turns."""

    bound: Callable[[int], float]
    """Of transfers of so many tokens: two processes that copy with digest at once, the slower one.
    """
    raw: Callable[[], float]
    """One TCP stream over loopback."""


def run_sweep(
    contenders: Sequence[Contender],
    nbytes: dict[int, int],
    rounds: int,
    most_transfers: int,
    probes: Probes,
) -> Sweep:
    """Contenders take turns, another one first in each round."""
    sweep = Sweep(nbytes)
    for tokens, size in nbytes.items():
        able = [contender for contender in contenders if size <= contender.most_bytes]
        count = max(1, min(most_transfers, ROUND_BYTES // size))
        for contender in able:
            contender.transfer(tokens, 1)
        for number in range(min(rounds, MOST_ROUNDS) if size > ROUND_BYTES else rounds):
            sweep.bounds.setdefault(tokens, []).append(probes.bound(tokens))
            sweep.raw.append(probes.raw())
            first = number % len(able)
            for contender in able[first:] + able[:first]:
                cell = sweep.found.setdefault(Cell(contender.name, tokens), Found())
                cell.batches.append(contender.transfer(tokens, count))
                if contender.many is not None and size <= ROUND_BYTES:
                    cell.many.append(contender.many(tokens, max(count, 2 * MANY_AT_ONCE)))
        for contender in able:
            sweep.ways[Cell(contender.name, tokens)] = contender.way(tokens)
        print(f"{size >> 10:,} KiB: done", file=sys.stderr)
    return sweep


def sweep_rows(sweep: Sweep, contenders: Sequence[Contender]) -> Iterator[dict[str, Scalar]]:
    for tokens, size in sweep.nbytes.items():
        bound = statistics.median(sweep.bounds[tokens])
        raw = statistics.median(sweep.raw)
        yield {"what": "two-copy bound", "KiB": size >> 10, "GB/s": bound / 1e9}
        for contender in contenders:
            found = sweep.found.get(Cell(contender.name, tokens))
            if found is None:
                continue
            rate = statistics.median(found.rates(size))
            latencies = sorted(found.latencies_s)
            cpu_s = sum(batch.cpu_s for batch in found.batches)
            most = statistics.median(found.bandwidths(size))
            way = sweep.ways[Cell(contender.name, tokens)]
            yield {
                "what": f"{contender.name} ({way})" if way else contender.name,
                "KiB": size >> 10,
                "GB/s": rate / 1e9,
                "of peak": rate / (raw if contender.is_network else bound),
                "GB/s of many": most / 1e9 if found.many else None,
                "p50 ms": statistics.median(latencies) * 1e3,
                "p99 ms": latencies[int(0.99 * (len(latencies) - 1))] * 1e3,
                "per s": most / size,
                "CPU s/GB": cpu_s / (len(latencies) * size / 1e9),
                "n": len(latencies),
            }
    yield {"what": "raw TCP over loopback", "GB/s": statistics.median(sweep.raw) / 1e9}


def sweep_claims(sweep: Sweep, networked_peers: Sequence[str], peers: Sequence[str]) -> list[Claim]:
    """The worst size of those promised. ``peers``: of shm."""
    claims = []
    claimed = [tokens for tokens, size in sweep.nbytes.items() if size >= CLAIMED_FROM]
    claims += _worst(
        "shm_vs_bound", [_of_bound(sweep, "shm", tokens) for tokens in claimed], GOAL_VS_BOUND
    )
    for id, ours, others in (
        ("shm_vs_nixl", "shm", peers),
        ("tcp_vs_peers", "tcp", networked_peers),
    ):
        ratios = [
            _ratio(sweep, ours, tokens, best)
            for tokens in claimed
            if (best := _best(sweep, others, tokens))
        ]
        claims += _worst(id, ratios, GOAL_VS_PEERS)
    shares = [_ratio(sweep, "tcp", tokens, sweep.raw) for tokens in claimed]
    claims += _worst("tcp_of_raw", shares, None)
    return claims


def _of_bound(sweep: Sweep, name: str, tokens: int) -> Interval | None:
    """The bound knows no hand-offs: what stands against it is the bandwidth of many transfers."""
    found = sweep.found.get(Cell(name, tokens))
    if found is None:
        return None
    return paired_ratio(found.bandwidths(sweep.nbytes[tokens]), sweep.bounds[tokens])


def _ratio(sweep: Sweep, name: str, tokens: int, others: Sequence[float]) -> Interval | None:
    found = sweep.found.get(Cell(name, tokens))
    if found is None:
        return None
    rates = found.rates(sweep.nbytes[tokens])
    if len(others) != len(rates):
        other = statistics.median(others)
        return bootstrap_median([rate / other for rate in rates])
    return paired_ratio(rates, others)


def _best(sweep: Sweep, names: Sequence[str], tokens: int) -> list[float]:
    """Rates, round by round, of the fastest of some contenders at one size."""
    size = sweep.nbytes[tokens]
    cells = [sweep.found.get(Cell(name, tokens)) for name in names]
    rates = [cell.rates(size) for cell in cells if cell is not None]
    return max(rates, key=statistics.median, default=[])


def _worst(id: str, ratios: Sequence[Interval | None], goal: float | None) -> list[Claim]:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return []
    worst = min(known, key=lambda ratio: ratio.median)
    return [claim_from(worst, id=id, better=Better.HIGHER, goal=goal)]
