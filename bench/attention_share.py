"""How much of a decode step is attention: sequences of equal length, one step of all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.limits import Limits
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.bench.stats import interquartile
from kvferry.cache.paged import PagedKV, block_nbytes
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner, attention_for
from kvferry.engine.step_tensors import StepTensors
from kvferry.models.decoder import Decoder, Heads
from kvferry.models.load import load_model
from kvferry.models.spec import ModelSpec

GOAL_SHARE = 0.25
BLOCK_SIZE = 16
CACHES = (torch.float32, torch.bfloat16, torch.int8)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What is measured."""

    batch: int = 32
    context: int = 511
    """Tokens of each sequence before the step."""
    repeats: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of each repeat."""

    cache: torch.dtype
    whole: list[float]
    """Of steps, without sampling."""
    attention: list[float]
    """Of the attention of all layers, with the write of keys and values."""

    @property
    def shares(self) -> list[float]:
        return [part / all_ for part, all_ in zip(self.attention, self.whole, strict=True)]


def measure_shares(folder: Path, spec: ModelSpec, sizes: StepSizes) -> list[StepTimes]:
    """In float32 on the CPU, for caches of several types. Torch has its threads already."""
    decoder = load_model(folder, torch.float32)
    return [_measure(decoder, spec, sizes, cache) for cache in CACHES]


def share_claim(times: list[StepTimes]) -> Claim:
    """Of a float32 cache, which is what the other engines have."""
    (found,) = (t for t in times if t.cache is torch.float32)
    return Claim(
        id="decode_attention_share",
        value=statistics.median(found.shares),
        better=Better.LOWER,
        goal=GOAL_SHARE,
        n=len(found.shares),
        spread=interquartile(found.shares),
    )


def share_row(
    times: StepTimes, spec: ModelSpec, sizes: StepSizes, limits: Limits
) -> dict[str, Scalar]:
    attention_s = statistics.median(times.attention)
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    layers, heads, dim = shape
    nbytes = (
        sizes.batch
        * (sizes.context + 1)
        * block_nbytes(
            num_layers=layers, num_kv_heads=heads, head_dim=dim, block_size=1, dtype=times.cache
        )
    )
    return {
        "what": f"decode, batch {sizes.batch} of {sizes.context + 1} tokens",
        "engine": f"kvferry, {str(times.cache).removeprefix('torch.')} cache",
        "ms/step": statistics.median(times.whole) * 1e3,
        "attention ms/step": attention_s * 1e3,
        "of bytes/s": nbytes / attention_s / limits.bytes_per_s,
        "n": len(times.whole),
    }


def _measure(decoder: Decoder, spec: ModelSpec, sizes: StepSizes, cache: torch.dtype) -> StepTimes:
    blocks = -(-(sizes.context + 1) // BLOCK_SIZE)
    kv = PagedKV.allocate(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=BLOCK_SIZE,
        num_blocks=sizes.batch * blocks,
        dtype=cache,
    )
    _fill(kv)
    plan = _plan(sizes, blocks)
    runner = ModelRunner(decoder, kv, spec.vocab_size)
    attend = attention_for(decoder, kv)(StepTensors.build(plan, BLOCK_SIZE, "cpu"))
    heads = _heads(spec, sizes.batch)

    def attend_all() -> None:
        for layer in range(spec.num_layers):
            attend(layer, heads)

    found = StepTimes(cache=cache, whole=[], attention=[])
    with torch.inference_mode():
        runner.logits(plan)
        for _ in range(sizes.repeats):
            found.whole.append(_seconds(lambda: runner.logits(plan)))
            found.attention.append(_seconds(attend_all))
    return found


def _fill(kv: PagedKV) -> None:
    """Memory that was never written is one page of zeros, which stays in the processor's caches."""
    if kv.tensor.dtype is torch.int8:
        kv.tensor.random_(-127, 128)
    else:
        kv.tensor.normal_()
    if kv.scales is not None:
        kv.scales.fill_(1 / 127)


def _plan(sizes: StepSizes, blocks: int) -> StepPlan:
    rows = np.ones(sizes.batch, np.int32)
    tables = np.random.default_rng(0).permutation(sizes.batch * blocks)
    return StepPlan(
        step=0,
        token_ids=np.zeros(sizes.batch, np.int64),
        query_lens=rows,
        context_lens=rows * np.int32(sizes.context),
        block_tables=tables.reshape(sizes.batch, blocks).astype(np.int32),
        sampled=np.arange(sizes.batch, dtype=np.int32),
        sampling=SamplingRows.greedy(sizes.batch),
    )


def _heads(spec: ModelSpec, batch: int) -> Heads:
    q, k, v = (
        torch.randn(batch, count, spec.head_dim)
        for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    )
    cos, sin = torch.randn(2, batch, spec.head_dim // 2)
    return Heads(q, k, v, cos, sin)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
