"""What a burst did to those who were decoding: inter-token latency, rates, and the best budget."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.bench.burst_load import Played
from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import paired_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One burst on one system; times in seconds."""

    latencies_s: Sequence[float]
    """Between tokens of all requests, the first gap of the burst's own included: all gaps that were
    open at some time between the burst's arrival and its last token.
    """
    before_s: float
    """Median of the gaps before the burst."""
    ttfts_s: Sequence[float]
    first_gaps_s: Sequence[float]
    """Of the burst's requests, between the first and the second token."""
    window_s: float
    prompt_tokens: int
    output_tokens: int
    """Of all requests, in the window."""

    @property
    def p50_s(self) -> float:
        return percentile(self.latencies_s, 0.50)

    @property
    def p99_s(self) -> float:
        return percentile(self.latencies_s, 0.99)

    @property
    def prompt_rate(self) -> float:
        return self.prompt_tokens / self.window_s

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.window_s

    @property
    def rate(self) -> float:
        """Tokens per second, read or written."""
        return self.prompt_rate + self.output_rate


def measured(played: Played, prompt_tokens: int) -> Burst:
    """``prompt_tokens``: of the whole burst."""
    began_s, ended_s = played.began_s, played.ended_s
    streams = [*played.sequences, *played.burst]
    gaps = [gap for stream in played.sequences for gap in stream.gaps()]
    before = [
        later - earlier
        for earlier, later in gaps
        if earlier >= played.decoding_s and later <= began_s
    ]
    within = [gap for stream in streams for gap in stream.gaps()]
    return Burst(
        latencies_s=[
            later - earlier for earlier, later in within if later > began_s and earlier < ended_s
        ],
        before_s=statistics.median(before),
        ttfts_s=[stream.seen_s[0] - stream.sent_s for stream in played.burst],
        first_gaps_s=[stream.seen_s[1] - stream.seen_s[0] for stream in played.burst],
        window_s=ended_s - began_s,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(began_s < at <= ended_s for stream in streams for at in stream.seen_s),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed: one that was seen."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def best_colocated(pd: Sequence[Burst], colocated: Mapping[str, Sequence[Burst]]) -> str:
    """The name of the fairest opponent: of those with at least the throughput of ``pd`` the one of
    the lowest p99; where there is none, the one of the highest throughput. Medians of the rounds.
    """
    rates = {name: _rate(found) for name, found in colocated.items()}
    enough = [name for name, rate in rates.items() if rate >= _rate(pd)]
    if not enough:
        return max(rates, key=rates.__getitem__)
    return min(enough, key=lambda name: statistics.median(b.p99_s for b in colocated[name]))


def _rate(found: Sequence[Burst]) -> float:
    return statistics.median(burst.rate for burst in found)


def claims(pd: Sequence[Burst], colocated: Sequence[Burst]) -> list[Claim]:
    """Of prefill + decode over the best colocated system, round by round: reported, not promised.

    Which of latency and throughput is worth more is for whoever serves to say.
    """
    latency = paired_ratio([b.p99_s for b in pd], [b.p99_s for b in colocated])
    rate = paired_ratio([b.rate for b in pd], [b.rate for b in colocated])
    ttft = paired_ratio(
        *([statistics.median(b.ttfts_s) for b in found] for found in (pd, colocated))
    )
    return [
        claim_from(latency, id="burst_p99_itl_ratio", better=Better.LOWER),
        claim_from(rate, id="burst_throughput_ratio", better=Better.HIGHER),
        claim_from(ttft, id="burst_ttft_ratio", better=Better.LOWER),
    ]


def row(found: Sequence[Burst]) -> dict[str, Scalar]:
    """Medians over the rounds; the longest latency is that of all rounds."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "ITL before ms": median([b.before_s * 1e3 for b in found]),
        "ITL p50 ms": median([b.p50_s * 1e3 for b in found]),
        "ITL p99 ms": median([b.p99_s * 1e3 for b in found]),
        "ITL max ms": max(s * 1e3 for b in found for s in b.latencies_s),
        "1st gap p50 ms": median([s * 1e3 for b in found for s in b.first_gaps_s]),
        "1st gap max ms": max(s * 1e3 for b in found for s in b.first_gaps_s),
        "TTFT p50 s": median([s for b in found for s in b.ttfts_s]),
        "TTFT max s": median([max(b.ttfts_s) for b in found]),
        "prompt tokens/s": median([b.prompt_rate for b in found]),
        "output tokens/s": median([b.output_rate for b in found]),
        "n": len(found),
    }
