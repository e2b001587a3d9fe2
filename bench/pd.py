"""One prefill and one decode worker against one worker that does both: TTFT and the hand-off.

Both systems live at the same time, in worker processes of their own, each with its router in this
process; requests run one at a time, in interleaved pairs of equal prompts that no cache knows. What
idles costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, option_parser, positive_count, run_options
from kvferry.bench.report import Better, Claim, Report, Scalar, claim_from
from kvferry.bench.stats import bootstrap_median, interquartile, paired_ratio
from kvferry.bench.topology import colocated_config, pd_config, serving
from kvferry.core.request import GenerateRequest, Timeline
from kvferry.core.sampling import SamplingParams
from kvferry.models.spec import read_spec
from kvferry.router.router import Router

GOAL_TTFT_RATIO = 1.10
GOAL_GAP_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PdSizes:
    """What is measured. The decode steps after the second token tell the inter-token latency."""

    prompt_len: int = 512
    num_tokens: int = 17
    pairs: int = 24
    warm_up: int = 2


QUICK = PdSizes(prompt_len=16, num_tokens=5, pairs=2, warm_up=1)


@dataclass(frozen=True, slots=True)
class Request:
    """What one request showed its client, in seconds, and its timeline."""

    ttft_s: float
    gap_s: float
    """Between the first and the second token."""
    latencies_s: tuple[float, ...]
    """Between the tokens after the second."""
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requests of both systems, pair by pair."""

    pd: Sequence[Request]
    colocated: Sequence[Request]

    def gap_shares(self) -> list[float]:
        """Per pair: the gap on PD beyond a usual inter-token latency, as a share of its TTFT."""
        return [
            (ours.gap_s - statistics.median(base.latencies_s)) / ours.ttft_s
            for ours, base in zip(self.pd, self.colocated, strict=True)
        ]

    def claims(self) -> list[Claim]:
        ttft = paired_ratio([r.ttft_s for r in self.pd], [r.ttft_s for r in self.colocated])
        gap = bootstrap_median(self.gap_shares())
        return [
            claim_from(ttft, id="pd_ttft_ratio", better=Better.LOWER, goal=GOAL_TTFT_RATIO),
            claim_from(gap, id="handoff_gap_share", better=Better.LOWER, goal=GOAL_GAP_SHARE),
        ]

    def rows(self) -> list[dict[str, Scalar]]:
        return [_row("prefill + decode", self.pd), _row("colocated", self.colocated)]


def run(args: list[str]) -> Report:
    parser = option_parser("pd", __doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument(
        "--pairs", type=positive_count, default=PdSizes().pairs, help="default: %(default)s"
    )
    options = parser.parse_args(args)
    plain = run_options(options)
    sizes = QUICK if options.quick else PdSizes(pairs=options.pairs)
    comparison = asyncio.run(_compare(options, sizes))
    return Report(
        bench="pd", rows=comparison.rows(), claims=comparison.claims(), options=finished(plain)
    )


async def _compare(options: argparse.Namespace, sizes: PdSizes) -> Comparison:
    folder = await asyncio.to_thread(prepared, options.model)
    vocab_size = read_spec(folder).vocab_size
    draw = random.Random(0)
    systems = {"pd": pd_config(options.threads), "colocated": colocated_config(options.threads)}
    found: dict[str, list[Request]] = {name: [] for name in systems}
    async with AsyncExitStack() as stack:
        routers = {
            name: await stack.enter_async_context(serving(config, folder))
            for name, config in systems.items()
        }
        for number in range(-sizes.warm_up, sizes.pairs):
            prompt = [draw.randrange(vocab_size) for _ in range(sizes.prompt_len)]
            for name in sorted(found, reverse=bool(number % 2)):
                request = await _request(routers[name], prompt, sizes.num_tokens)
                if number >= 0:
                    found[name].append(request)
    return Comparison(found["pd"], found["colocated"])


async def _request(router: Router, prompt: Sequence[int], num_tokens: int) -> Request:
    """One greedy request, timed where its client stands."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    request = GenerateRequest(prompt_token_ids=tuple(prompt), sampling=sampling)
    timeline = Timeline(prompt_tokens=len(prompt))
    started = time.perf_counter()
    seen = []
    async with aclosing(router.generate(request, 0, timeline)) as steps:
        async for step in steps:
            seen += [time.perf_counter() - started] * len(step.token_ids)
    assert len(seen) == num_tokens, f"{len(seen)} tokens arrived"
    gaps = [later - earlier for earlier, later in itertools.pairwise(seen)]
    return Request(seen[0], gaps[0], tuple(gaps[1:]), timeline)


def _row(system: str, requests: Sequence[Request]) -> dict[str, Scalar]:
    """Medians over the requests."""
    timelines = [request.timeline for request in requests]
    ttft_ms = [request.ttft_s * 1e3 for request in requests]
    return {
        "system": system,
        "TTFT ms": statistics.median(ttft_ms),
        "±": interquartile(ttft_ms),
        "1st gap ms": statistics.median(request.gap_s * 1e3 for request in requests),
        "ITL ms": statistics.median(t * 1e3 for r in requests for t in r.latencies_s),
        "transfer bytes": round(statistics.median(t.transfer_bytes for t in timelines)),
        "GB/s": statistics.median(t.scatter_gb_per_s for t in timelines),
        "transfer ms": statistics.median(t.transfer_wall_s * 1e3 for t in timelines),
        "exposed ms": statistics.median(t.transfer_exposed_s * 1e3 for t in timelines),
        "n": len(requests),
    }
