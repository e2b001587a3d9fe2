"""What `kvferry bench engine` states of its rates, beside the best peer and the machine."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.bench.costs import prefill_costs
from kvferry.bench.limits import Limits
from kvferry.bench.report import Better, Claim
from kvferry.bench.stats import interquartile
from kvferry.bench.step_loop import LoopSizes, LoopTimes
from kvferry.bench.throughput import PREFILL, Rates, Sizes
from kvferry.models.spec import ModelSpec

GOALS_VS_BEST: dict[str | int, float] = {PREFILL: 1.0, 1: 1.0, 8: 1.5, 32: 1.3}
"""Prefill, and decode by batch: our rate over the best peer's."""
ALL_PEERS = 3
"""transformers, vLLM and llama.cpp: the best of fewer is not promised anything."""
GOAL_SHARE_OF_PEAK = 0.9
GOALS_LOOP_MS = {256: 0.5, 1024: 1.5}


def rate_claims(ours: Rates, sizes: Sizes) -> list[Claim]:
    """Of each quantity by itself."""
    names: dict[str | int, str] = {PREFILL: f"prefill_tokens_per_s_{sizes.prefill_len}"}
    names |= {batch: f"decode_tokens_per_s_b{batch}" for batch in sizes.batches}
    return [
        Claim(
            id=name,
            value=ours.median(what),
            better=Better.HIGHER,
            n=len(ours.values(what)),
            spread=interquartile(ours.values(what)),
            unit="tokens/s",
        )
        for what, name in names.items()
    ]


def peer_claims(ours: Rates, peers: Sequence[Rates], sizes: Sizes) -> list[Claim]:
    """Each quantity over the best peer's in the same run; without a goal unless all peers ran."""
    claims = []
    whats: list[str | int] = [PREFILL, *sizes.batches]
    for what in whats:
        best = max((peer.median(what) for peer in peers), default=0.0)
        if not best:
            continue
        name = "prefill_vs_best" if isinstance(what, str) else f"decode_b{what}_vs_best"
        claims.append(
            Claim(
                id=name,
                value=ours.median(what) / best,
                better=Better.HIGHER,
                goal=GOALS_VS_BEST.get(what) if len(peers) == ALL_PEERS else None,
                n=len(ours.values(what)),
                spread=interquartile(ours.values(what)) / best,
            )
        )
    return claims


def peak_claim(ours: Rates, spec: ModelSpec, sizes: Sizes, limits: Limits) -> Claim:
    """Prefill's FLOP/s over those of a large product in the same run; attention counts."""
    flops_per_token = prefill_costs(spec, sizes.prefill_len).flops / sizes.prefill_len
    per_rate = flops_per_token / limits.flops_per_s
    values = ours.values(PREFILL)
    return Claim(
        id="prefill_share_of_peak",
        value=ours.median(PREFILL) * per_rate,
        better=Better.HIGHER,
        goal=GOAL_SHARE_OF_PEAK,
        n=len(values),
        spread=interquartile(values) * per_rate,
    )


def loop_claim(sizes: LoopSizes, times: LoopTimes) -> Claim:
    return Claim(
        id=f"loop_ms_{sizes.running}",
        value=times.wall_ms,
        better=Better.LOWER,
        goal=GOALS_LOOP_MS.get(sizes.running),
        n=sizes.steps,
        spread=times.spread_ms,
        unit="ms",
    )
