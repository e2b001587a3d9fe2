"""Prefill and decode rates of one worker beside other engines, and the step loop's own time.

Our side is a whole worker of role ``both`` in this process: encoded messages in, encoded tokens
out, the real role, step loop, runner and sampler; only gRPC is left out. All prompts of a batch are
computed in one step, so that decode steps are those of the whole batch and nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvferry.bench.attention_share import StepSizes, measure_shares, share_claim, share_row
from kvferry.bench.cache_hit import hit_claim, hit_row, measure_hit
from kvferry.bench.engine_claims import loop_claim, peak_claim, peer_claims, rate_claims
from kvferry.bench.hf_peer import TransformersEngine
from kvferry.bench.limits import Limits, measure_limits
from kvferry.bench.local_worker import LocalWorker, colocated_config, sequence_spec
from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, option_parser, positive_count, run_options
from kvferry.bench.peers import f32_gguf, llama_rates, vllm_rates
from kvferry.bench.report import Report, Scalar
from kvferry.bench.step_gap import gap_claim, gap_rows, measure_gap
from kvferry.bench.step_loop import LoopSizes, LoopTimes, measure_loop
from kvferry.bench.throughput import Rates, Sizes, Timing, measure_rates, rate_rows
from kvferry.core.config import EMBEDDED_MODEL
from kvferry.core.errors import StartupError
from kvferry.engine.loading import load_backend
from kvferry.models.fetch import SMOLLM2
from kvferry.models.spec import ModelSpec, read_spec
from kvferry.models.weight_cache import cache_root

QUICK = Sizes(prefill_len=12, prompt_len=8, num_tokens=4, batches=(1, 2), repeats=2)


class KvferryEngine:
    """One worker that does all, driven to the end of a batch."""

    name = "kvferry"

    def __init__(self, folder: Path, spec: ModelSpec, sizes: Sizes, threads: int) -> None:
        batch = max(sizes.batches)
        longest = max(sizes.prefill_len + 1, sizes.prompt_len + sizes.num_tokens)
        # Room for two batches: blocks of the one before are still cached.
        tokens = 2 * (batch * longest + sizes.prefill_len) + 64 * batch
        nbytes = tokens * spec.kv_elements_per_token * 4
        config = colocated_config(threads, sizes.most_tokens, batch, f"{nbytes}B", longest)
        backend = load_backend(folder, spec.vocab_size, config.model, config.decode, "decode")
        self._worker = LocalWorker(config, backend)

    def close(self) -> None:
        self._worker.close()

    def timing(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> Timing:
        worker = self._worker
        requests = [worker.request(sequence_spec(prompt, num_tokens)) for prompt in prompts]
        started = time.perf_counter()
        for request in requests:
            worker.receive(request.reserve)
        granted = sum(message.HasField("granted") for message in worker.turn())
        assert granted == len(prompts), f"{granted} of {len(prompts)} reservations were granted"
        for request in requests:
            worker.receive(request.prefill)
        firsts = sum(message.HasField("prefill_done") for message in worker.turn())
        assert firsts == len(prompts), "the prompts did not fit one step"
        first_s = time.perf_counter() - started
        for _ in range(num_tokens - 1):
            tokens = sum(len(m.tokens.token_ids) for m in worker.turn() if m.HasField("tokens"))
            assert tokens == len(prompts), f"a step gave {tokens} tokens"
        return Timing(first_s, time.perf_counter() - started - first_s)


def run(args: list[str]) -> Report:
    options = _options(args)
    plain = run_options(options)
    sizes = QUICK if options.quick else Sizes(repeats=options.repeats)
    steps = StepSizes(batch=2, context=20, repeats=2) if options.quick else StepSizes()
    loops = [(loop, measure_loop(loop)) for loop in loop_sizes(options.quick)]
    running = loop_sizes(options.quick)[0].running
    gaps = measure_gap(running, steps=4 if options.quick else 200)
    hits = measure_hit(repeats=5 if options.quick else 200)
    folder = prepared(options.model)
    spec = read_spec(folder)
    limits = _limits(options)
    shares = measure_shares(folder, spec, steps)
    ours, *peers = _rates(options, folder, spec, sizes)
    rows = rate_rows(ours, peers, spec, sizes, limits)
    rows += [share_row(times, spec, steps, limits) for times in shares]
    loop_rows = [_loop_row(loop, times) for loop, times in loops] + gap_rows(running, gaps)
    return Report(
        bench="engine",
        rows=[*rows, *loop_rows, hit_row(hits)],
        claims=[
            *rate_claims(ours, sizes),
            *peer_claims(ours, peers, sizes),
            peak_claim(ours, spec, sizes, limits),
            share_claim(shares),
            *(loop_claim(*loop) for loop in loops),
            gap_claim(running, gaps),
            hit_claim(hits),
        ],
        options=finished(
            plain
            | {
                "machine_gflop_per_s": limits.flops_per_s / 1e9,
                "machine_gb_per_s": limits.bytes_per_s / 1e9,
            }
        ),
    )


def _options(args: list[str]) -> argparse.Namespace:
    parser = option_parser("engine", __doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument(
        "--repeats",
        type=positive_count,
        default=Sizes().repeats,
        help="of every rate (default: %(default)s)",
    )
    parser.add_argument("--peer-vllm", metavar="PYTHON", help="interpreter that has vLLM")
    parser.add_argument(
        "--peer-llama", metavar="LLAMA_BATCHED_BENCH", help="llama.cpp's llama-batched-bench"
    )
    parser.add_argument(
        "--llama-gguf", metavar="FILE", help="float32 GGUF; default: made from the embedded model"
    )
    return parser.parse_args(args)


def _limits(options: argparse.Namespace) -> Limits:
    if options.quick:
        return measure_limits(options.threads, product_size=64, read_bytes=1 << 20, repeats=2)
    return measure_limits(options.threads)


def _rates(options: argparse.Namespace, folder: Path, spec: ModelSpec, sizes: Sizes) -> list[Rates]:
    """Ours first. Peers in this process take turns with it; programs of their own run after it."""
    engine = KvferryEngine(folder, spec, sizes, options.threads)
    try:
        found = measure_rates([engine, TransformersEngine(folder)], spec.vocab_size, sizes)
    finally:
        engine.close()
    if options.peer_vllm:
        rates = vllm_rates(options.peer_vllm, folder, spec.vocab_size, sizes, options.threads)
        found.append(rates)
    if options.peer_llama:
        with tempfile.TemporaryDirectory(prefix="kvferry-") as scratch:
            gguf = _llama_gguf(options, Path(scratch))
            found.append(llama_rates(options.peer_llama, gguf, sizes, options.threads))
    return found


def _llama_gguf(options: argparse.Namespace, scratch: Path) -> Path:
    if options.llama_gguf:
        return Path(options.llama_gguf)
    if options.model != EMBEDDED_MODEL:
        raise StartupError("--llama-gguf: give the float32 GGUF file of this --model")
    return f32_gguf(options.peer_llama, cache_root() / Path(SMOLLM2.member).name, scratch)


def loop_sizes(quick: bool) -> list[LoopSizes]:
    """What the step loop is timed with; the first is claimed."""
    if quick:
        return [LoopSizes(running=4, prompt_len=8, max_tokens=8, steps=4)]
    return [LoopSizes(running=256), LoopSizes(running=1024)]


def _loop_row(sizes: LoopSizes, times: LoopTimes) -> dict[str, Scalar]:
    return {
        "what": f"step loop, {sizes.running} running",
        "engine": "kvferry, no model",
        "ms/step": times.wall_ms,
        "processor ms/step": times.cpu_ms,
        "arrivals/step": times.arrivals / sizes.steps,
        "n": sizes.steps,
    }
