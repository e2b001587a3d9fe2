"""A burst of long prompts while sequences decode: prefill + decode beside colocated workers.

Every system has the same number of threads in all, divided over its workers, each a process of its
own. All live at the same time and take turns; what idles costs nothing. Greedy sequences decode
steadily, then long prompts arrive at once; tokens are timed where the router's clients stand.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.bench.burst_load import Load, draw_prompts, play
from kvferry.bench.burst_measure import Burst, best_colocated, claims, measured, row
from kvferry.bench.burst_plot import latency_plot
from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, new_file, option_parser, positive_count, run_options
from kvferry.bench.report import Report, Scalar
from kvferry.bench.topology import colocated_config, pd_config, serving
from kvferry.models.spec import read_spec
from kvferry.router.router import Router

PD = "prefill + decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstSizes:
    """What is measured."""

    load: Load = field(default_factory=Load)
    budgets: Sequence[int] = (64, 128, 256, 512)
    """Tokens per step of a colocated worker."""
    rounds: int = 3


QUICK = BurstSizes(
    load=Load(sequences=3, sequence_len=8, settle_tokens=2, burst=2, burst_len=24, burst_tokens=3),
    budgets=(16,),
    rounds=1,
)


@dataclass(frozen=True, slots=True)
class Contender:
    """One system."""

    layout: str
    budget: int | None
    """None: it has none that decoding and prefill share."""
    config: dict[str, Any]

    @property
    def name(self) -> str:
        return self.layout if self.budget is None else f"{self.layout}, budget {self.budget}"


def contenders(threads: int, budgets: Sequence[int]) -> list[Contender]:
    """All of ``threads`` in all, an even number."""
    found = [Contender(PD, None, pd_config(threads // 2))]
    for workers in (1, 2):
        each = threads // workers
        layout = f"colocated, {workers} x {each} thread{'s' * (each > 1)}"
        for budget in budgets:
            config = colocated_config(each, workers)
            config["decode"]["max_batch_tokens"] = budget
            found.append(Contender(layout, budget, config))
    return found


def run(args: list[str]) -> Report:
    parser = _parser()
    options = parser.parse_args(args)
    if options.threads % 2:
        parser.error("--threads: an even number, half of it for each of two workers")
    plain = run_options(options)
    sizes = QUICK if options.quick else BurstSizes(rounds=options.rounds)
    known = contenders(options.threads, sizes.budgets)
    found = asyncio.run(_measure(prepared(options.model), known, sizes))
    pd = found[PD]
    colocated = {name: bursts for name, bursts in found.items() if name != PD}
    best = best_colocated(pd, colocated)
    if options.plot is not None:
        options.plot.write_text(latency_plot(found, {PD, best}), encoding="utf-8")
    rows = [_row(contender, found[contender.name], best) for contender in known]
    return Report(
        bench="burst", rows=rows, claims=claims(pd, colocated[best]), options=finished(plain)
    )


def _row(contender: Contender, bursts: Sequence[Burst], best: str) -> dict[str, Scalar]:
    return {
        "system": contender.layout,
        "budget": contender.budget,
        "": "best" if contender.name == best else "",
        **row(bursts),
    }


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("burst", __doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument(
        "--rounds", type=positive_count, default=BurstSizes().rounds, help="default: %(default)s"
    )
    parser.add_argument(
        "--plot", type=new_file, metavar="FILE.svg", help="draw latency over percentile"
    )
    return parser


async def _measure(
    folder: Path, known: Sequence[Contender], sizes: BurstSizes
) -> dict[str, list[Burst]]:
    """Contender -> its bursts, one per round. Each round starts with another contender."""
    vocab_size = read_spec(folder).vocab_size
    draw = random.Random(0)
    found: dict[str, list[Burst]] = {contender.name: [] for contender in known}
    async with AsyncExitStack() as stack:
        routers = {
            c.name: await stack.enter_async_context(serving(c.config, folder)) for c in known
        }
        for router in routers.values():
            warm_up = replace(sizes.load, sequences=2, settle_tokens=2, burst=1)
            await _burst(router, warm_up, vocab_size, draw)
        for number in range(sizes.rounds):
            first = number % len(known)
            for contender in [*known[first:], *known[:first]]:
                burst = await _burst(routers[contender.name], sizes.load, vocab_size, draw)
                found[contender.name].append(burst)
    return found


async def _burst(router: Router, load: Load, vocab_size: int, draw: random.Random) -> Burst:
    played = await play(router, load, draw_prompts(load, vocab_size, draw))
    return measured(played, load.burst * load.burst_len)
