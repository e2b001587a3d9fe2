"""How long a device waits for the host between two steps: from the tokens of one to the inputs of
the next.

Two workers take turns, whose devices compute nothing: one leaves the loop time to plan ahead while
a step is in flight, the other has each step done before anybody asks. Nobody comes or goes. The
first step of a turn finds the processor's cache cold, and is not counted.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field, replace

import torch

from kvferry.bench.local_worker import LocalWorker, colocated_config, sequence_spec
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.bench.stats import interquartile
from kvferry.bench.step_loop import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    LoopSizes,
    TensorOnlyRunner,
    backend_without_model,
)
from kvferry.engine.fake_runner import FastFakeRunner
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.step_tensors import StepArrays

STEPS_PER_TURN = 20


@dataclass(frozen=True, slots=True)
class GapTimes:
    """Milliseconds, one element per step."""

    ahead: list[float]
    after: list[float]


@dataclass(slots=True, eq=False)
class _Device:
    """A Launcher that notes how long it had nothing to do."""

    is_slow: bool
    """Whether a step is still in flight when the loop looks."""
    gaps_ms: list[float] = field(default_factory=list)
    num_ahead: int = 0
    """Steps that were prepared."""
    _ended_s: float | None = None
    _prepared: tuple[StepPlan, StepArrays] | None = None
    _tokens: FastFakeRunner = field(default_factory=lambda: FastFakeRunner(VOCAB_SIZE))

    def prepare(self, plan: StepPlan) -> None:
        self._prepared = plan, StepArrays.of(plan, BLOCK_SIZE)

    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> _Flight:
        prepared, self._prepared = self._prepared, None
        is_ready = prepared is not None and prepared[0] is plan
        arrays = prepared[1] if prepared and is_ready else StepArrays.of(plan, BLOCK_SIZE)
        self.num_ahead += is_ready
        arrays.on(torch.device("cpu"))
        if self._ended_s is not None:
            self.gaps_ms.append((time.perf_counter() - self._ended_s) * 1e3)
        return _Flight(self, plan)

    def rest(self) -> None:
        """What comes before the next step is no gap."""
        self._ended_s = None

    def end(self, plan: StepPlan) -> StepResult:
        result = self._tokens.execute(plan)
        self._ended_s = time.perf_counter()
        return result


@dataclass(frozen=True, slots=True)
class _Flight:
    device: _Device
    plan: StepPlan

    def done(self) -> bool:
        return not self.device.is_slow

    def wait(self) -> StepResult:
        return self.device.end(self.plan)


def measure_gap(running: int, steps: int) -> GapTimes:
    """Of ``running`` sequences that decode, in as many whole turns as ``steps`` takes."""
    turns = -(-steps // STEPS_PER_TURN)
    sizes = LoopSizes(running=running, max_tokens=turns * (STEPS_PER_TURN + 1) + 2)
    devices = [_Device(is_slow=True), _Device(is_slow=False)]
    workers = [_decoding(sizes, device) for device in devices]
    try:
        for _ in range(turns):
            for device, worker in zip(devices, workers, strict=True):
                device.rest()
                for _ in range(STEPS_PER_TURN + 1):
                    worker.turn()
    finally:
        for worker in workers:
            worker.close()
    planned_ahead = [device.num_ahead > 0 for device in devices]
    assert planned_ahead == [True, False], "each plans in its own way"
    return GapTimes(*(device.gaps_ms for device in devices))


def _decoding(sizes: LoopSizes, device: _Device) -> LocalWorker:
    """A worker whose sequences have all their first token."""
    config = colocated_config(
        threads=1,
        batch_tokens=sizes.live * (1 + sizes.prompt_len),
        batch_seqs=sizes.live,
    )
    backend = replace(backend_without_model(sizes, TensorOnlyRunner()), launcher=device)
    worker = LocalWorker(config, backend)
    draw = random.Random(0)
    requests = [
        worker.request(
            sequence_spec(
                [draw.randrange(VOCAB_SIZE) for _ in range(sizes.prompt_len)], sizes.max_tokens
            )
        )
        for _ in range(sizes.running)
    ]
    for request in requests:
        worker.receive(request.reserve)
    worker.turn()
    for request in requests:
        worker.receive(request.prefill)
    worker.turn()
    return worker


def gap_claim(running: int, times: GapTimes) -> Claim:
    return Claim(
        id=f"loop_gap_ms_{running}",
        value=statistics.median(times.ahead),
        spread=interquartile(times.ahead),
        unit="ms",
        better=Better.LOWER,
        n=len(times.ahead),
    )


def gap_rows(running: int, times: GapTimes) -> list[dict[str, Scalar]]:
    return [
        {
            "what": f"between steps of a device, {running} running",
            "engine": f"kvferry, planned {how}",
            "gap ms": statistics.median(gaps),
            "n": len(gaps),
        }
        for how, gaps in (("ahead", times.ahead), ("after", times.after))
    ]
