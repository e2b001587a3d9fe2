"""One colocated worker under pressure, and a router that sends out again what is given back.

Everything is real but the model, whose KV spells the tokens that it stands for, and the router. All
is turned by hand on a clock set by hand; nothing sleeps.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from fake_engine_model import expected
from local_system import fake_backend, local_config
from role_ports import ROUTER

from kvferry.cache.block_pool import BlockState
from kvferry.core.ids import AttemptKey, RequestId
from kvferry.decode_worker.admission import Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.fake_runner import WrongKV
from kvferry.engine.loop import StepLoop
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.ports import FromRouter, Relief, SessionOpened
from kvferry.engine.sequences import State, WorkerSequence
from kvferry.engine.wiring import build_parts
from kvferry.proto import worker_pb2 as pb

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64


@dataclass(slots=True, eq=False)
class Request:
    """One request as its router sees it."""

    number: int
    prompt: list[int]
    max_tokens: int
    born_s: float
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    given_back: int = 0
    outcome: str = ""
    computed: Counter[int] = field(default_factory=Counter)
    """Times that the KV of each position was computed."""

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def key(self) -> pb.Key:
        return pb.Key(request=self.number, attempt=self.attempt)


class PressureGate:
    """Takes blocks as a test says."""

    def __init__(self) -> None:
        self.shut = False
        self.wants: dict[int, Relief] = {}
        """Request -> what becomes of it before the next step."""
        self.keeps: set[int] = set()
        """Requests that stay in host memory."""

    def holds(self, state: str, key: AttemptKey) -> bool:
        return state == State.SWAPPED and key.request in self.keeps

    def preempts(self, key: AttemptKey, computed: int, length: int) -> Relief | None:
        return self.wants.pop(key.request, None)


class PressureRig:
    """``turn`` is one round of worker and router."""

    def __init__(
        self,
        num_blocks: int,
        num_host_slots: int = 0,
        *,
        growth_tokens: int = 4,
        max_batch_tokens: int = 16,
        max_batch_seqs: int = 16,
        prefix_cache: bool = True,
        fail: random.Random | None = None,
    ) -> None:
        """``fail``: one step in eight cannot be run."""
        self.now = 100.0
        self.requests: list[Request] = []
        self.unsent: deque[Request] = deque()
        self.steps = 0
        self.wrong: list[WrongKV] = []
        """Steps that met other KV than there should be: the loop takes them for steps that fail."""
        self.fail = fail
        config = local_config(
            decode={"max_batch_seqs": max_batch_seqs, "prefix_cache": prefix_cache}
        ).decode
        self.backend = fake_backend(
            BLOCK_SIZE, num_blocks, MAX_MODEL_LEN, num_host_slots=num_host_slots
        )
        root = self.backend.identity.root("it")
        parts = build_parts(self.backend, config, root, 1e9, lambda: self.now)
        self.pool, self.sequences = parts.pool, parts.sequences
        self.gate = PressureGate()
        self.batch = DecodeBatch(
            parts.sequences, parts.stepper, self.gate, max_batch_tokens, max_batch_seqs
        )
        self.ledger = Ledger(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            growth_tokens=growth_tokens,
        )
        self.role = DecodeRole(
            parts.sequences,
            self.ledger,
            self.batch,
            _NoReceiver(),
            self.gate,
            64,
            "",
            num_host_slots,
        )
        self.loop = StepLoop(self.role, self, lambda: self.now)
        self.loop.post(SessionOpened(self))

    incarnation = ROUTER

    def submit(self, prompt: list[int], max_tokens: int) -> Request:
        self.now += 1e-3
        number = len(self.requests) + 1
        request = Request(number, prompt, max_tokens, self.now, list(prompt))
        self.requests.append(request)
        self.unsent.append(request)
        return request

    def cancel(self, request: Request) -> None:
        if not request.outcome:
            request.outcome = "cancelled"
            self._say(cancel=pb.Cancel(key=request.key))

    def send_again(self, request: Request) -> None:
        """As if its attempt had failed."""
        self._say(cancel=pb.Cancel(key=request.key))
        self.unsent.append(request)

    def preempt(self, request: Request, relief: Relief) -> None:
        """Before the next step, if it computes then."""
        self.gate.shut = True
        self.gate.wants[request.number] = relief

    def turn(self) -> bool:
        """Returns whether a step was run."""
        self.now += 1e-3
        while self.unsent:
            self._dispatch(self.unsent.popleft())
        before = self.steps
        self.loop.turn()
        self.gate.wants.clear()
        return self.steps > before

    def sequence(self, request: Request) -> WorkerSequence | None:
        key = AttemptKey(ROUTER, RequestId(request.number), request.attempt)
        return self.sequences.get(key)

    def state(self, request: Request) -> State | None:
        seq = self.sequence(request)
        return seq.state if seq else None

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        self.steps += 1
        if self.fail is not None and self.fail.randrange(8) == 0:
            raise RuntimeError("the device fell over")
        for block in plan.swap_out[:, 0].tolist():
            # Whatever else is written to it may be written before it is copied.
            assert self.pool.state(block) not in (BlockState.FREE, BlockState.RESERVED)
        for seq, start, count in zip(
            self.batch.planned.seqs, plan.context_lens, plan.query_lens, strict=True
        ):
            request = self.requests[seq.key.request - 1]
            request.computed.update(range(int(start), int(start + count)))
        try:
            return self.backend.runner.execute(plan, layer_done)
        except WrongKV as error:
            self.wrong.append(error)
            raise

    def send(self, message: pb.WorkerMessage) -> None:
        """The router hears."""
        kind = message.WhichOneof("kind") or ""
        if kind == "tokens":
            self._tokens(message.tokens)
            return
        if kind == "cache_delta":
            return
        said = getattr(message, kind)
        request = self.requests[said.key.request - 1]
        if request.outcome or said.key.attempt != request.attempt:
            return
        if kind == "granted":
            self._say(prefill=pb.Prefill(key=request.key, sequence=self._spec(request)))
        elif kind == "prefill_done":
            self._add(request, said.token_id, said.finish_reason)
        elif kind == "preempted":
            request.given_back += 1
            self.unsent.append(request)
        elif kind == "failed":
            self.unsent.append(request)
        elif kind == "refused":
            request.outcome = said.reason
        else:
            raise AssertionError(f"{kind} is not expected")

    def check(self) -> None:
        """What holds between any two turns."""
        assert not self.wrong
        counts = self.pool.counts()
        assert counts.total == self.pool.num_blocks
        assert counts.fenced == self.pool.num_fences == 0, "no step is under way"
        held = {block for seq in self.sequences for block in seq.blocks}
        assert len(held) == counts.in_use + counts.reserved
        slots = [slot for seq in self.sequences for slot in seq.slots]
        assert len(set(slots)) == len(slots) <= self.backend.kv.num_host_slots
        table = self.sequences.table
        rows = self.sequences.held_rows()
        waste = table.num_blocks[rows] * table.block_size - table.length[rows]
        assert (waste < table.block_size).all(), "more than one partial block"
        for seq in self.sequences:
            assert not (seq.slots and seq.state is not State.SWAPPED)
            assert not (seq.blocks and seq.state is State.SWAPPED)

    def check_end(self) -> None:
        """All is over, and all is given back."""
        self.check()
        counts = self.pool.counts()
        assert counts.in_use == counts.reserved == len(self.sequences) == 0
        assert self.sequences.table.num_free == self.sequences.table.max_rows
        assert self.role.num_free_slots == self.backend.kv.num_host_slots

    def _dispatch(self, request: Request) -> None:
        if request.outcome:
            return
        request.attempt += 1
        spec = self._spec(request)
        self._say(reserve=pb.Reserve(key=request.key, sequence=spec, local=True))

    def _spec(self, request: Request) -> pb.SequenceSpec:
        sampling = pb.Sampling(
            max_tokens=request.max_tokens, ignore_eos=True, top_p=1.0, repetition_penalty=1.0
        )
        return pb.SequenceSpec(
            token_ids=request.tokens,
            prompt_len=len(request.prompt),
            deadline_s=1e9,
            sampling=sampling,
            age_s=self.now - request.born_s,
            given_back=request.given_back,
        )

    def _say(self, **kind: object) -> None:
        self.loop.post(FromRouter(self, pb.RouterMessage(**kind)))

    def _tokens(self, tokens: pb.Tokens) -> None:
        reasons = {f.key.request: f.reason for f in tokens.finished}
        for number, attempt, token in zip(
            tokens.requests, tokens.attempts, tokens.token_ids, strict=True
        ):
            request = self.requests[number - 1]
            if attempt == request.attempt and not request.outcome:
                self._add(request, token, reasons.get(number, ""))

    def _add(self, request: Request, token: int, reason: str) -> None:
        request.tokens.append(token)
        if reason:
            request.outcome = "done"
            assert request.output == expected(request.prompt, request.max_tokens)


class _NoReceiver:
    """No KV comes from outside."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.tallies: Counter[str] = Counter()
