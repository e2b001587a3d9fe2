"""What a cached prefix costs: its blocks found and put into a block table; no tensors."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from kvferry.bench.local_worker import sequence_spec
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.bench.stats import interquartile
from kvferry.cache.block_pool import BlockPool
from kvferry.core.ids import AttemptKey, BlockHash, Incarnation, RequestId
from kvferry.engine.ports import RouterPort
from kvferry.engine.sequences import Sequences, WorkerSequence
from kvferry.engine.table import SequenceTable
from kvferry.proto import worker_pb2 as pb

BLOCK_SIZE = 16
TOKENS = 4096
GOAL_MS = 1.0


@dataclass(frozen=True, slots=True)
class HitTimes:
    """Milliseconds per request, one element per repeat."""

    hashing: list[float]
    """Taking the request in, of which the chain of block hashes is nearly all."""
    lookup: list[float]
    """Finding its blocks, taking references, filling its row of the table."""


class _NoPort:
    incarnation = Incarnation(1)

    def send(self, message: pb.WorkerMessage) -> None:
        raise AssertionError("nothing is said to a router here")


def measure_hit(num_tokens: int = TOKENS, repeats: int = 100) -> HitTimes:
    """A prompt of ``num_tokens`` cached tokens and one more."""
    table = SequenceTable(2, num_tokens + 2 * BLOCK_SIZE, BLOCK_SIZE)
    pool = BlockPool(2 * num_tokens // BLOCK_SIZE + 2)
    sequences = Sequences(table, pool, BlockHash(b"root" * 4), time.monotonic, 60.0, 1 << 30)
    prompt = np.arange(num_tokens + 1).tolist()
    times = HitTimes([], [])
    for number in range(repeats + 1):
        started = time.perf_counter()
        seq = _opened(sequences, number, prompt)
        hashed = time.perf_counter()
        cached = sequences.cached_blocks(seq, seq.length - 1)
        held = sequences.hold(seq, cached, reserved=False)
        found = time.perf_counter()
        assert held, "there is room for two prompts"
        if number:  # the first one fills the cache
            assert len(cached) == num_tokens // BLOCK_SIZE, "the whole prefix is cached"
            times.hashing.append(1e3 * (hashed - started))
            times.lookup.append(1e3 * (found - hashed))
        sequences.publish(seq, seq.length)
        sequences.close(seq)
        pool.drain_events()
    return times


def hit_claim(times: HitTimes) -> Claim:
    return Claim(
        id=f"hit_ms_{TOKENS}",
        value=statistics.median(times.lookup),
        spread=interquartile(times.lookup),
        unit="ms",
        better=Better.LOWER,
        goal=GOAL_MS,
        n=len(times.lookup),
    )


def hit_row(times: HitTimes) -> dict[str, Scalar]:
    return {
        "what": f"hit on {TOKENS:,} cached tokens",
        "engine": "kvferry, no model",
        "n": len(times.lookup),
        "ms/step": statistics.median(times.lookup),
        "hashing ms": statistics.median(times.hashing),
    }


def _opened(sequences: Sequences, number: int, prompt: list[int]) -> WorkerSequence:
    key = AttemptKey(Incarnation(1), RequestId(number), 1)
    port: RouterPort = _NoPort()
    return sequences.open(key, port, sequence_spec(prompt, 8))
