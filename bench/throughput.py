"""Prefill and decode rates, defined once for every engine that is compared.

Prefill is the time to the first token of one prompt. Decode is the rate of the steps after the
first token of a batch of equally long prompts: tokens of those steps over their time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvferry.bench.costs import decode_costs, prefill_costs
from kvferry.bench.limits import Limits
from kvferry.bench.report import Scalar
from kvferry.bench.stats import interquartile
from kvferry.models.spec import ModelSpec


class Timing(NamedTuple):
    """Seconds of one batch."""

    first_s: float
    """Until every request has its first token."""
    rest_s: float
    """From then until every request has its last."""


class Engine(Protocol):
    """Something that generates."""

    name: str

    def timing(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        """Generate exactly ``num_tokens`` greedy tokens after each prompt; all are equally long."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    prefill_len: int = 512
    prompt_len: int = 256
    num_tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 3

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step: all prompts of the largest batch at once."""
        return max(self.prefill_len, max(self.batches) * self.prompt_len)


PREFILL = "prefill"


@dataclass(slots=True)
class Rates:
    """Tokens per second of one engine, one value per repeat."""

    name: str
    prefill: list[float] = field(default_factory=list)
    decode: dict[int, list[float]] = field(default_factory=dict)

    def median(self, what: str | int) -> float:
        """Median of a quantity: PREFILL or a batch size. 0 when it was not measured."""
        values = self.values(what)
        return statistics.median(values) if values else 0.0

    def values(self, what: str | int) -> list[float]:
        return self.prefill if isinstance(what, str) else self.decode.get(what, [])


def measure_rates(engines: Sequence[Engine], vocab_size: int, sizes: Sizes) -> list[Rates]:
    """Engines take turns, so that a slow minute of the machine meets all of them."""
    draw = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]

    found = [Rates(engine.name) for engine in engines]
    for engine in engines:
        engine.timing(prompts(1, min(8, sizes.prompt_len)), 2)
    for _ in range(sizes.repeats):
        for engine, rates in zip(engines, found, strict=True):
            first_s, _ = engine.timing(prompts(1, sizes.prefill_len), 1)
            rates.prefill.append(sizes.prefill_len / first_s)
    for batch in sizes.batches:
        for _ in range(sizes.repeats):
            for engine, rates in zip(engines, found, strict=True):
                timing = engine.timing(prompts(batch, sizes.prompt_len), sizes.num_tokens)
                tokens = batch * (sizes.num_tokens - 1)
                rates.decode.setdefault(batch, []).append(tokens / timing.rest_s)
    return found


def rate_rows(
    ours: Rates, peers: Sequence[Rates], spec: ModelSpec, sizes: Sizes, limits: Limits
) -> list[dict[str, Scalar]]:
    """One row per quantity and engine; shares are of the machine's limits in the same run."""
    rows = []
    quantities: list[str | int] = [PREFILL, *sizes.batches]
    for what in quantities:
        best_peer = max((peer.median(what) for peer in peers), default=0.0)
        for rates in (ours, *peers):
            if not rates.values(what):
                continue
            row = _row(rates, what, spec, sizes, limits)
            if rates is ours and best_peer:
                row["of best peer"] = rates.median(what) / best_peer
            rows.append(row)
    return rows


def _row(
    rates: Rates, what: str | int, spec: ModelSpec, sizes: Sizes, limits: Limits
) -> dict[str, Scalar]:
    rate = rates.median(what)
    if isinstance(what, str):
        label = f"prefill, {sizes.prefill_len} tokens"
        costs, tokens = prefill_costs(spec, sizes.prefill_len), sizes.prefill_len
    else:
        label = f"decode, batch {what}"
        contexts = range(sizes.prompt_len, sizes.prompt_len + sizes.num_tokens - 1)
        costs, tokens = decode_costs(spec, what, contexts), what * len(contexts)
    seconds = tokens / rate
    return {
        "what": label,
        "engine": rates.name,
        "tokens/s": rate,
        "±": interquartile(rates.values(what)),
        "of best peer": None,
        "of FLOP/s": costs.flops / seconds / limits.flops_per_s,
        "of bytes/s": costs.nbytes / seconds / limits.bytes_per_s,
        "n": len(rates.values(what)),
    }
