"""How much of a transfer shows when its prompt is computed meanwhile."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import interleaved_pairs, paired_ratio
from kvferry.bench.transfer_orders import Prefilled
from kvferry.bench.transfer_pair import Pair

GOAL_EXPOSED = 0.20
GOAL_SHORT = 1.02
TRANSPORT = "shm"
THREADS = 1
"""Of the computation, as workers have by default: the other processor moves KV."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSizes:
    long_tokens: int = 1024
    long_pairs: int = 5
    short_tokens: int = 128
    short_pairs: int = 24
    learn_prompts: int = 4
    """From these the policy learns the rates before its choices count."""


def measure_overlap(
    pair: Pair, folder: Path, sizes: OverlapSizes
) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """Rows and claims. The sender computes real prompts; the receiver is the other process."""
    longest = max(sizes.long_tokens, sizes.short_tokens)
    layout = pair.load(str(folder), THREADS, longest, TRANSPORT)
    runs: dict[tuple[str, int], list[Prefilled]] = {}

    def prompt(push: str, tokens: int) -> Prefilled:
        found = pair.prefill(push, TRANSPORT, layout.dtype, tokens)
        runs.setdefault((push, tokens), []).append(found)
        return found

    def value(push: str, tokens: int, of: Callable[[Prefilled], float]) -> Callable[[], float]:
        return lambda: of(prompt(push, tokens))

    for tokens in (sizes.long_tokens, sizes.short_tokens):
        prompt("layers", tokens)
        prompt("whole", tokens)
    for _ in range(sizes.learn_prompts):
        prompt("auto", sizes.short_tokens)
    runs.clear()
    exposed, whole = interleaved_pairs(
        value("layers", sizes.long_tokens, lambda run: run.exposed_s),
        value("whole", sizes.long_tokens, lambda run: run.wall_s),
        sizes.long_pairs,
    )
    auto, single = interleaved_pairs(
        value("auto", sizes.short_tokens, lambda run: run.total_s),
        value("whole", sizes.short_tokens, lambda run: run.total_s),
        sizes.short_pairs,
    )
    claims = [
        claim_from(
            paired_ratio(exposed, whole),
            id="exposed_layerwise",
            better=Better.LOWER,
            goal=GOAL_EXPOSED,
        ),
        claim_from(
            paired_ratio(auto, single),
            id="short_prompt_ratio",
            better=Better.LOWER,
            goal=GOAL_SHORT,
        ),
    ]
    rows = [
        _row(push, tokens, found, tokens * layout.token_bytes)
        for (push, tokens), found in runs.items()
    ]
    print("prompts: done", file=sys.stderr)
    return rows, claims


def _row(push: str, tokens: int, runs: Sequence[Prefilled], nbytes: int) -> dict[str, Scalar]:
    def median_ms(of: Callable[[Prefilled], float]) -> float:
        return statistics.median(map(of, runs)) * 1e3

    return {
        "what": f"prompt of {tokens} tokens, push {push}",
        "KiB": nbytes >> 10,
        "computed ms": median_ms(lambda run: run.compute_s),
        "delivered ms": median_ms(lambda run: run.total_s),
        "exposed ms": median_ms(lambda run: run.exposed_s),
        "n": len(runs),
    }
