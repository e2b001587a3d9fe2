"""Decode steps replayed as graphs against the same steps launched kernel by kernel.

Used by `make gpu` on a device, and by a test with a fake capture.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvferry.bench.engine_check import CONFIG, Setting, on_backend, random_decoder
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.cache.paged import PagedKV
from kvferry.engine.cuda_capture import CudaCapture
from kvferry.engine.graphs import Capture
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder
from kvferry.models.spec import parse_spec

SETTINGS = (
    (Backend.TRITON_BATCH_INVARIANT, torch.bfloat16, torch.bfloat16, 0.0),
    (Backend.TRITON, torch.bfloat16, torch.bfloat16, 6e-2),
    (Backend.TRITON, torch.bfloat16, torch.float8_e4m3fn, 6e-2),
)
"""Backend, compute and cache types; largest relative difference. A product of the vendor's library
may add up in another order for the rows of a bucket than for those of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Which steps are compared and timed."""

    batches: Sequence[int] = (1, 3, 8, 32, 64)
    query_lens: Sequence[int] = (1, 4)
    context_len: int = 500
    block_size: int = 16
    repeats: int = 20


@dataclass(slots=True, eq=False)
class Pair:
    """One decoder and cache, eager and with graphs."""

    eager: ModelRunner
    graphs: ModelRunner
    block_size: int
    vocab_size: int

    def difference(self, plan: StepPlan) -> float:
        """Of the logits, relative to the largest; of the step that was prepared before its tokens
        were known, too.
        """
        eager = self.eager.logits(plan).float().clone()
        token_ids = plan.token_ids.copy()
        plan.token_ids[:] = 0
        self.graphs.prepare(plan)
        plan.token_ids[:] = token_ids
        prepared = self.graphs.logits(plan).float().clone()
        replayed = self.graphs.logits(plan).float()
        # One maximum of both: a NaN in either comes out.
        apart = (torch.stack([prepared, replayed]) - eager).abs().max()
        return float(apart / eager.abs().max())


def pair_of(decoder: Decoder, setting: Setting, sizes: Sizes, capture: Capture) -> Pair:
    spec = decoder.spec
    most, longest = max(sizes.batches), max(sizes.query_lens)
    kv = PagedKV.allocate(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=sizes.block_size,
        num_blocks=most * -(-(sizes.context_len + longest) // sizes.block_size),
        dtype=setting.kv_dtype,
        device=setting.device,
    )
    on_device = on_backend(decoder, setting)
    eager, graphs = (ModelRunner(on_device, kv, spec.vocab_size) for _ in range(2))
    graphs.capture_graphs(capture, lambda done, total: None, most, longest)
    return Pair(eager, graphs, sizes.block_size, spec.vocab_size)


def step_of(pair: Pair, num_seqs: int, query_len: int, context_len: int) -> StepPlan:
    """Sequences of about the same context, in blocks in random order."""
    rng = np.random.default_rng(num_seqs)
    width = -(-(context_len + query_len) // pair.block_size)
    return StepPlan(
        step=0,
        token_ids=rng.integers(pair.vocab_size, size=num_seqs * query_len),
        query_lens=np.full(num_seqs, query_len, np.int32),
        context_lens=(context_len - rng.integers(0, 20, num_seqs)).clip(0).astype(np.int32),
        block_tables=rng.permutation(num_seqs * width).reshape(num_seqs, width).astype(np.int32),
        sampled=np.arange(num_seqs, dtype=np.int32),
        sampling=SamplingRows.greedy(num_seqs),
    )


def median_ms(run: Callable[[], object], settle: Callable[[], None], repeats: int) -> float:
    """Wall time of a step that somebody waits for."""
    times = []
    for _ in range(repeats):
        settle()
        started = time.perf_counter()
        run()
        settle()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


@torch.inference_mode()
def check_graphs(
    device: torch.device,
    make_capture: Callable[[torch.device], Capture] = CudaCapture,
    settle: Callable[[], None] = torch.cuda.synchronize,
    *,
    decoder: Decoder | None = None,
    settings: Sequence[tuple[Backend, torch.dtype, torch.dtype, float]] = SETTINGS,
    sizes: Sizes | None = None,
    budget_s: float = math.inf,
) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """A row per setting and step. ``settle`` waits for the device. No setting begins, but the
    first, once half of the budget is used up: each compiles kernels of its own.
    """
    begun = time.monotonic()
    decoder = decoder or random_decoder(parse_spec(CONFIG), seed=0)
    sizes = sizes or Sizes()
    rows: list[dict[str, Scalar]] = []
    speedups: list[float] = []
    wrong = 0
    for backend, dtype, kv_dtype, bound in settings:
        if rows and time.monotonic() - begun > budget_s / 2:
            break
        setting = Setting(backend=backend, device=device, dtype=dtype, kv_dtype=kv_dtype)
        pair = pair_of(decoder, setting, sizes, make_capture(device))
        for num_seqs, query_len in itertools.product(sizes.batches, sizes.query_lens):
            plan = step_of(pair, num_seqs, query_len, sizes.context_len)
            difference = pair.difference(plan)
            eager_ms, graph_ms = (
                median_ms(partial(runner.logits, plan), settle, sizes.repeats)
                for runner in (pair.eager, pair.graphs)
            )
            speedups.append(eager_ms / graph_ms)
            wrong += not difference <= bound
            rows.append(
                {
                    "backend": backend.value,
                    "kv": str(kv_dtype).removeprefix("torch."),
                    "sequences": num_seqs,
                    "tokens each": query_len,
                    "difference": difference,
                    "bound": bound,
                    "eager ms": eager_ms,
                    "graph ms": graph_ms,
                    "outcome": "right" if difference <= bound else "WRONG",
                }
            )
    return rows, [
        Claim(id="gpu.graphs_wrong", value=wrong, better=Better.LOWER, goal=0, n=len(rows)),
        Claim(
            id="gpu.graphs_least_speedup",
            value=min(speedups),
            better=Better.HIGHER,
            goal=1,
            n=len(rows),
            unit="x",
        ),
    ]
