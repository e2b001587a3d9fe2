"""One prefill worker, turned by hand, whose sender notes what it hears."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from local_system import fake_backend, local_config
from role_ports import ROUTER, NotingPort, prompt_spec

from kvferry.core.ids import AttemptKey, RequestId
from kvferry.engine.loop import StepLoop
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.ports import FromRouter, OpenGate, SessionOpened
from kvferry.engine.wiring import build_parts
from kvferry.kv_transfer.group.orders import Chunk
from kvferry.kv_transfer.group.sender import layer_listener
from kvferry.kv_transfer.jobs import (
    SendAborted,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.wire import layout_message, layout_of
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.prefill_worker.role import PrefillRole
from kvferry.proto import worker_pb2 as pb

NUM_LAYERS = 3
PROMPT = list(range(10, 47))  # 37 tokens: chunks of 16, 16 and 5


class NotingSender:
    """A sender that sends nothing."""

    def __init__(self) -> None:
        self.jobs: dict[AttemptKey, SendJob] = {}
        self.reports: dict[AttemptKey, list[tuple[int, int]]] = {}
        self.aborted: list[AttemptKey] = []

    def begin(self, jobs: Sequence[SendJob]) -> None:
        (job,) = jobs  # the target has one rank
        assert job.key not in self.jobs, "begun twice"
        self.jobs[job.key] = job
        self.reports[job.key] = []

    def follow(self, step: int, chunks: Sequence[Chunk]) -> LayerDone:
        return layer_listener(self, chunks, NUM_LAYERS)

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None:
        reports = self.reports[key]
        if reports and tokens_end > reports[-1][1]:
            tokens = reports[-1][1]
            assert (NUM_LAYERS, tokens) in reports, f"{tokens} tokens were left behind"
        reports.append((layers_end, tokens_end))

    def abort(self, key: AttemptKey) -> None:
        self.aborted.append(key)


class Rig:
    """One prefill worker, turned by hand on a clock set by hand."""

    def __init__(
        self, eos: tuple[int, ...] = (), look_ahead: int = 16, **hooks: Callable[..., None]
    ) -> None:
        """``look_ahead``: tokens that may be before a prompt that is taken."""
        self.now = 0.0
        self.spoil_next = False
        self.chunks: list[dict[int, int]] = []
        """Tokens per request in each step so far."""
        pool = local_config().prefill
        backend = fake_backend(pool.block_size, eos=eos, num_layers=NUM_LAYERS, **hooks)
        self._runner = backend.runner
        parts = build_parts(backend, pool, backend.identity.root("float64"), 30.0, self.clock)
        self.pool, self.sequences = parts.pool, parts.sequences
        self.sender = NotingSender()
        batch = self.batch = PrefillBatch(parts.sequences, parts.stepper, OpenGate(), 16, 8)
        admission = PromptAdmission(
            num_blocks=64, block_size=4, max_model_len=128, max_batch_tokens=look_ahead
        )
        self.layout = layout_of(backend.kv)
        self.role = PrefillRole(parts.sequences, admission, batch, self.sender, self.layout)
        self.loop = StepLoop(self.role, self, self.clock)
        self.port = NotingPort()
        self.loop.post(SessionOpened(self.port))

    def clock(self) -> float:
        return self.now

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        counts = zip(self.batch.planned.seqs, plan.query_lens.tolist(), strict=True)
        self.chunks.append({seq.key.request: count for seq, count in counts})
        result = self._runner.execute(plan, layer_done)
        if self.spoil_next and len(result.token_ids):
            result.invalid = (0,)
        return result

    def say(self, **kind: Any) -> None:
        self.loop.post(FromRouter(self.port, pb.RouterMessage(**kind)))

    def prefill(
        self,
        prompt: list[int] = PROMPT,
        request: int = 1,
        attempt: int = 1,
        cached: int = 0,
        deadline_s: float = 60.0,
    ) -> AttemptKey:
        """Ask for a prompt whose KV goes to a worker that holds ``cached`` tokens."""
        target = pb.Target(
            peer=7,
            endpoints=[pb.KvEndpoint(endpoint="loopback:none")],
            lease=request,
            cached_tokens=cached,
            layout=layout_message(self.layout),
            wire="float64",
            root_hash=b"theirs",
        )
        spec = prompt_spec(prompt, deadline_s)
        key = pb.Key(request=request, attempt=attempt)
        self.say(prefill=pb.Prefill(key=key, sequence=spec, target=target))
        return AttemptKey(ROUTER, RequestId(request), attempt)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def hear(self, event: SendDone | SendFailed | SendAborted) -> None:
        """A word of the sender, and the turn that takes it in."""
        self.loop.post(event)
        self.turn()

    def held(self) -> int:
        counts = self.pool.counts()
        return counts.in_use + counts.reserved

    def fenced(self) -> int:
        """Transfers that still pin blocks."""
        return self.pool.num_fences
