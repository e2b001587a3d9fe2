"""KV from one process to another: transports and peers by size, re-layout, overlap with compute.

Two worker processes of this host hold paged caches shaped like those of Llama 3.2 1B; transfers go
through sender, links, receiver and memory exactly as in workers: packed, digested, verified,
scattered, acknowledged. Peers, each a program of its own, move the same blocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, new_file, option_parser, run_options
from kvferry.bench.report import Claim, Report, Scalar
from kvferry.bench.transfer_cache import BLOCK_SIZE, cache_layout
from kvferry.bench.transfer_contenders import (
    MOONCAKE,
    NIXL,
    NIXL_TCP,
    peers_at_hand,
    start_contenders,
    usable_transports,
)
from kvferry.bench.transfer_overlap import OverlapSizes, measure_overlap
from kvferry.bench.transfer_pair import Setting, transfer_pair
from kvferry.bench.transfer_plot import rate_plot
from kvferry.bench.transfer_relayout import relayout_claims, relayout_rows
from kvferry.bench.transfer_sweep import (
    Contender,
    Probes,
    Sweep,
    run_sweep,
    sweep_claims,
    sweep_rows,
)
from kvferry.core.errors import ConfigError
from kvferry.core.units import parse_bytes
from kvferry.kv_transfer.peaks import loopback_peak

MEMORY_SHARE = 0.6
"""Of the memory of the machine that caches may take."""
BOUND = "two-copy bound"
BOUND_S = 0.2
"""For which it is measured, each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSizes:
    """What is measured."""

    nbytes: Sequence[int] = tuple(1 << power for power in (19, 22, 24, 26, 28, 30))
    """The smallest is one block."""
    held_bytes: int = 256 << 20
    """That transfers, of ours and of peers, and the copies of the bound take turns in: together
    more than the processors' own caches hold. Larger transfers go over all that they move.
    """
    rounds: int = 5
    most_transfers: int = 40
    """Of one contender and size in a round."""
    relayout_bytes: int = 16 << 20
    pairs: int = 24
    overlap: OverlapSizes = field(default_factory=OverlapSizes)


FULL = (*TransferSizes().nbytes, 1 << 32)
QUICK = TransferSizes(
    nbytes=(1 << 19, 1 << 22),
    held_bytes=1 << 22,
    rounds=1,
    most_transfers=2,
    relayout_bytes=1 << 20,
    pairs=2,
    overlap=OverlapSizes(
        long_tokens=32, long_pairs=1, short_tokens=16, short_pairs=1, learn_prompts=1
    ),
)


def run(args: list[str]) -> Report:
    options = _parser().parse_args(args)
    plain = run_options(options)
    transports, peers = usable_transports(options), peers_at_hand(options)
    sizes = _sizes(options, len(peers))
    layout = cache_layout(BLOCK_SIZE)
    tokens = max(sizes.nbytes[-1], sizes.held_bytes) // layout.token_bytes
    setting = Setting(
        source=layout,
        target=layout,
        wire=layout.dtype,
        tokens=tokens,
        walked=sizes.held_bytes // layout.token_bytes,
    )
    nbytes = {size // layout.token_bytes: size for size in sizes.nbytes}
    rows: list[dict[str, Scalar]] = []
    claims: list[Claim] = []
    with transfer_pair() as pair:
        with ExitStack() as stack:
            contenders = start_contenders(stack, pair, setting, transports, peers)
            probes = Probes(partial(pair.copy_rate, seconds=BOUND_S), loopback_peak)
            sweep = run_sweep(contenders, nbytes, sizes.rounds, sizes.most_transfers, probes)
        rows += sweep_rows(sweep, contenders)
        claims += sweep_claims(sweep, [NIXL_TCP, MOONCAKE], [NIXL])
        rows += relayout_rows(pair, sizes.relayout_bytes, sizes.held_bytes, 3 * sizes.rounds)
        with transfer_pair() as other:
            claims += relayout_claims(
                other, pair, sizes.relayout_bytes, sizes.held_bytes, sizes.pairs
            )
        found = measure_overlap(pair, prepared(options.model), sizes.overlap)
        rows += found[0]
        claims += found[1]
    if options.plot is not None:
        options.plot.write_text(_plot(sweep, contenders), encoding="utf-8")
    return Report(bench="transfer", rows=rows, claims=claims, options=finished(plain))


def _parser() -> argparse.ArgumentParser:
    parser = option_parser("transfer", __doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument("--transports", metavar="NAME,...", help="default: all that can be used")
    parser.add_argument(
        "--peer-mooncake", metavar="PYTHON", help="interpreter that has Mooncake and numpy"
    )
    parser.add_argument(
        "--peer-nixl",
        metavar="PYTHON",
        help="interpreter that has nixl-cu12 and numpy (default: this one, if it has)",
    )
    parser.add_argument("--sizes", metavar="SIZE,...", help="bytes of a transfer: 1MiB,1GiB")
    parser.add_argument("--full", action="store_true", help="up to 4 GiB: takes minutes more")
    parser.add_argument("--plot", type=new_file, metavar="FILE.svg", help="draw rate over size")
    return parser


def _sizes(options: argparse.Namespace, num_peers: int) -> TransferSizes:
    """Raises ConfigError for what cannot be read, or is more than the machine holds."""
    if options.quick:
        return QUICK
    nbytes: Sequence[int] = FULL if options.full else TransferSizes().nbytes
    if options.sizes is not None:
        try:
            nbytes = sorted({_whole_blocks(parse_bytes(part)) for part in options.sizes.split(",")})
        except ValueError as error:
            raise ConfigError("--sizes", str(error)) from None
    memory = MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for_peers = num_peers * 2 * TransferSizes().held_bytes
    fitting = [size for size in nbytes if 2 * size <= memory - for_peers]
    if not fitting:
        raise ConfigError("--sizes", f"caches of {nbytes[0]} bytes do not fit this machine")
    return TransferSizes(nbytes=fitting)


def _whole_blocks(nbytes: int) -> int:
    block_bytes = cache_layout(BLOCK_SIZE).block_bytes
    return max(1, nbytes // block_bytes) * block_bytes


def _plot(sweep: Sweep, contenders: Sequence[Contender]) -> str:
    lines = {BOUND: _points(sweep.nbytes, sweep.bounds)}
    for contender in contenders:
        rates = {
            cell.tokens: found.rates(sweep.nbytes[cell.tokens])
            for cell, found in sweep.found.items()
            if cell.contender == contender.name
        }
        lines[contender.name] = _points(sweep.nbytes, rates)
    return rate_plot("KV transfer between two processes", lines, frozenset({BOUND}))


def _points(nbytes: dict[int, int], rates: dict[int, list[float]]) -> list[tuple[float, float]]:
    return [(nbytes[tokens], statistics.median(found) / 1e9) for tokens, found in rates.items()]
