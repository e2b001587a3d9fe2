"""Time of the step loop itself, with a runner that computes nothing.

A step is all that happens from encoded messages in to encoded tokens out: decode and receive,
schedule, block growth, step tensors, commit with stop rules, encode. A request that ends is
replaced, so that arrivals, grants, prompts and endings are part of what is measured.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import torch

from kvferry.bench.local_worker import LocalWorker, colocated_config, sequence_spec
from kvferry.bench.stats import interquartile
from kvferry.cache.paged import PagedKV
from kvferry.engine.backend import Backend, ModelIdentity
from kvferry.engine.fake_runner import FastFakeRunner
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.step_tensors import StepTensors
from kvferry.proto import worker_pb2 as pb

VOCAB_SIZE = 32_000
BLOCK_SIZE = 16
NEVER = VOCAB_SIZE + 1
"""A token that is never sampled: sequences end at max_tokens, after every stop rule was checked."""
REPLACED_AFTER_STEPS = 2
"""Reserve is granted in one step and the prompt computed in the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSizes:
    """One measurement."""

    running: int
    prompt_len: int = 128
    max_tokens: int = 256
    steps: int = 400
    stop_ids: bool = False
    """Every request names a stop token id: rows that arrays alone do not settle."""

    @property
    def live(self) -> int:
        """Requests under way, so that ``running`` of them decode while others come in."""
        return self.running + REPLACED_AFTER_STEPS * -(-self.running // self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimes:
    """Milliseconds per step."""

    wall_ms: float
    """Median; includes waiting for a processor that others use."""
    spread_ms: float
    """Distance of the quartiles."""
    cpu_ms: float
    """Median processor time of the loop's thread: the wall time of an idle machine."""
    mean_sequences: float
    """Sequences per step, local prompts included."""
    arrivals: int


def measure_loop(sizes: LoopSizes) -> LoopTimes:
    """Keep ``sizes.running`` sequences running and time each step."""
    runner = TensorOnlyRunner()
    config = colocated_config(
        threads=1,
        batch_tokens=sizes.live * (1 + sizes.prompt_len),
        batch_seqs=sizes.live,
    )
    worker = LocalWorker(config, backend_without_model(sizes, runner))
    try:
        traffic = _Traffic(worker, sizes)
        for _ in range(REPLACED_AFTER_STEPS + 8):
            traffic.step()
        traffic.arrivals = 0
        return _summary(traffic, runner, sizes.steps)
    finally:
        worker.close()


class TensorOnlyRunner:
    """Builds a step's tensors, as the model's runner does first, and then makes tokens up."""

    def __init__(self) -> None:
        self._fake = FastFakeRunner(VOCAB_SIZE)
        self._device = torch.device("cpu")
        self.sequences = 0
        """Sequences in all steps so far."""

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        StepTensors.build(plan, BLOCK_SIZE, self._device)
        self.sequences += len(plan.query_lens)
        return self._fake.execute(plan)


class _Traffic:
    """A router that replaces every request that ends."""

    def __init__(self, worker: LocalWorker, sizes: LoopSizes) -> None:
        self._worker = worker
        self._sizes = sizes
        self._random = random.Random(0)
        self._prefills: dict[int, bytes] = {}
        self.arrivals = 0
        # Different lengths at first, so that ends are spread evenly from then on.
        lengths = range(sizes.live, 0, -1)
        self._outgoing = [self._request(-(-i * sizes.max_tokens // sizes.live)) for i in lengths]

    def step(self) -> tuple[float, float]:
        """One step: wall and processor seconds."""
        outgoing, self._outgoing = self._outgoing, []
        started, started_cpu = time.perf_counter(), time.thread_time()
        for encoded in outgoing:
            self._worker.receive(encoded)
        said = self._worker.turn()
        spent = time.perf_counter() - started, time.thread_time() - started_cpu
        ended = sum(self._answer(message) for message in said)
        self._outgoing += [self._request(self._sizes.max_tokens) for _ in range(ended)]
        return spent

    def _answer(self, message: pb.WorkerMessage) -> int:
        """Prepare what is due after ``message``. Returns how many requests it says have ended."""
        if message.HasField("granted"):
            self._outgoing.append(self._prefills.pop(message.granted.key.request))
        elif message.HasField("prefill_done"):
            return 1 if message.prefill_done.finish_reason else 0
        elif message.HasField("tokens"):
            return len(message.tokens.finished)
        return 0

    def _request(self, max_tokens: int) -> bytes:
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(self._sizes.prompt_len)]
        stop_ids = [NEVER] if self._sizes.stop_ids else []
        request = self._worker.request(sequence_spec(prompt, max_tokens, stop_ids))
        self._prefills[request.number] = request.prefill
        self.arrivals += 1
        return request.reserve


def _summary(traffic: _Traffic, runner: TensorOnlyRunner, steps: int) -> LoopTimes:
    before = runner.sequences
    timed = [traffic.step() for _ in range(steps)]
    wall_ms = [wall * 1e3 for wall, _ in timed]
    return LoopTimes(
        wall_ms=statistics.median(wall_ms),
        spread_ms=interquartile(wall_ms),
        cpu_ms=statistics.median(cpu * 1e3 for _, cpu in timed),
        mean_sequences=(runner.sequences - before) / steps,
        arrivals=traffic.arrivals,
    )


def backend_without_model(sizes: LoopSizes, runner: TensorOnlyRunner) -> Backend:
    """The smallest cache with room for all sequences at their longest."""
    max_model_len = sizes.prompt_len + sizes.max_tokens
    kv = PagedKV.allocate(
        num_layers=1,
        num_kv_heads=1,
        head_dim=2,
        block_size=BLOCK_SIZE,
        num_blocks=(sizes.live + 1) * -(-max_model_len // BLOCK_SIZE),
        dtype=torch.float32,
    )
    identity = ModelIdentity(1, b"no model", b"", "float32")
    return Backend(runner, kv, max_model_len, (NEVER + 1,), identity)
