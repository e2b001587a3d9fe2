"""Workers on the virtual clock: the real role, step loop, pool and fake model; hooks that let time
pass in the middle of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from fake_engine_model import VOCAB_SIZE

from kv_sim.clock import NEVER, Actor
from kv_sim.defects import Defect, UnfencedPool
from kvferry.cache.block_pool import BlockPool
from kvferry.cache.hashing import root_hash
from kvferry.cache.paged import PagedKV
from kvferry.core.ids import Incarnation
from kvferry.decode_worker.admission import Ledger
from kvferry.decode_worker.batch import DecodeBatch
from kvferry.decode_worker.role import DecodeRole
from kvferry.engine.commit import StopRules
from kvferry.engine.fake_runner import FakeRunner, WrongKV
from kvferry.engine.loop import StepLoop
from kvferry.engine.plan import LayerDone, StepPlan, StepResult
from kvferry.engine.ports import OpenGate
from kvferry.engine.sequences import Sequences
from kvferry.engine.steps import Stepper
from kvferry.engine.table import SequenceTable
from kvferry.kv_transfer.memory import PagedKvMemory
from kvferry.kv_transfer.wire import endpoint_messages, layout_message, layout_of
from kvferry.prefill_worker.admission import PromptAdmission
from kvferry.prefill_worker.batch import PrefillBatch
from kvferry.prefill_worker.role import PrefillRole
from kvferry.proto import worker_pb2 as pb

if TYPE_CHECKING:
    from kv_sim.world import World

MAX_MODEL_LEN = 40
MAX_SEQS = 6
LEASE_S = 3.0
HOST_SLOTS = (0, 3, 40)
"""What a decode worker out of blocks can do differs from life to life."""
IDLE_S = 0.25
"""A step loop with sequences looks at its deadlines at least so often."""
ROOT = root_hash(1, b"simulated", "", "float32", "float32")


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs from worker to worker."""

    name: str
    is_prefill: bool
    block_size: int
    num_blocks: int
    max_batch_tokens: int
    dtype: torch.dtype


class Worker(ABC):
    """One life of one worker process."""

    def __init__(self, world: World, shape: Shape, incarnation: int) -> None:
        self.world, self.shape = world, shape
        self.name = f"{shape.name}#{incarnation}"
        self.is_prefill = shape.is_prefill
        self.incarnation = Incarnation(incarnation)
        self.dead = False
        self.copying = 0
        """Packs or scatters that run."""
        self.actors: list[Actor] = []
        self.kv = PagedKV.allocate(
            num_layers=2,
            num_kv_heads=1,
            head_dim=4,
            block_size=shape.block_size,
            num_blocks=shape.num_blocks,
            dtype=shape.dtype,
            num_host_slots=0 if shape.is_prefill else HOST_SLOTS[incarnation % len(HOST_SLOTS)],
        )
        self.layout = layout_of(self.kv)
        pools = UnfencedPool if world.defect is Defect.NO_FENCES else BlockPool
        self.pool = pools(shape.num_blocks)
        table = SequenceTable(MAX_SEQS, MAX_MODEL_LEN, shape.block_size)
        self.sequences = Sequences(table, self.pool, ROOT, world.agenda.clock, LEASE_S, VOCAB_SIZE)
        self.stepper = Stepper(self.sequences, StopRules(table))
        self.memory = PagedKvMemory(self.kv.slots, self.layout, self.pool.generations)
        self.role: PrefillRole | DecodeRole = self._role()
        runner = FakeRunner(
            self.kv,
            VOCAB_SIZE,
            before_execute=self._in_step,
            before_layer=lambda plan, layer: self._in_step(plan),
            delay=self._in_step,
        )
        self.loop = StepLoop(self.role, CheckedRunner(world, self.name, runner), world.agenda.clock)
        self.thread = self.actor("loop", self._turn)

    def actor(self, name: str, turn) -> Actor:
        made = Actor(self.world.agenda, f"{self.name} {name}", turn)
        self.actors.append(made)
        return made

    def post(self, event: object) -> None:
        self.loop.post(event)
        self.thread.wake()

    def retire(self, actor: Actor) -> None:
        """A thread ends by itself."""
        actor.kill()
        self.actors.remove(actor)

    @property
    def paused(self) -> bool:
        return self.thread.frozen

    @property
    def is_stalled(self) -> bool:
        """Whether a thread of it is in the middle of something, or stopped."""
        return any(actor.busy or actor.frozen for actor in self.actors)

    def pause(self, seconds: float) -> None:
        for actor in list(self.actors):
            actor.freeze(seconds)

    @abstractmethod
    def kv_at_rest(self) -> str:
        """What the KV plane still holds, or nothing."""

    @abstractmethod
    def peer_died(self, peer: Worker) -> None:
        """The links to another process break."""

    @abstractmethod
    def cut_links(self) -> None:
        """All its links break."""

    def kill(self) -> None:
        """kill -9: no thread of it ever runs again."""
        self.dead = True
        for actor in self.actors:
            actor.kill()

    def busy(self, actor: Actor, seconds: float) -> None:
        """Time passes while this actor works. Raises Killed when it did not live through that."""
        self.world.agenda.pass_time(seconds)
        actor.check_alive()

    @abstractmethod
    def _role(self) -> PrefillRole | DecodeRole: ...

    def _turn(self) -> float:
        ran = self.loop.turn()
        self.world.invariants.after_turn(self)
        if ran:
            return 0.0
        return IDLE_S if len(self.sequences) else NEVER

    def _in_step(self, plan: StepPlan) -> None:
        self.busy(self.thread, self.world.pace.step_s())


class CheckedRunner:
    """A step that meets wrong KV is a violation, whatever the loop makes of the exception."""

    def __init__(self, world: World, name: str, runner: FakeRunner) -> None:
        self._world, self._name, self._runner = world, name, runner

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        try:
            return self._runner.execute(plan, layer_done)
        except WrongKV as error:
            self._world.wrong(f"{self._name}: {error}")
            raise
        except Exception as error:
            self._world.violation(f"{self._name}: step {plan.step}: {error!r}")
            raise


class PrefillSide(Worker):
    """A prefill worker."""

    def _role(self) -> PrefillRole:
        from kv_sim.sending import Sending

        shape = self.shape
        self.sending = Sending(self)
        batch = PrefillBatch(
            self.sequences, self.stepper, OpenGate(), shape.max_batch_tokens, MAX_SEQS
        )
        admission = PromptAdmission(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=MAX_MODEL_LEN,
            max_batch_tokens=shape.max_batch_tokens,
        )
        self.least_bytes = self.world.setup.least_bytes
        return PrefillRole(self.sequences, admission, batch, self.sending, self.layout)

    def kv_at_rest(self) -> str:
        return self.sending.at_rest()

    def cut_links(self) -> None:
        for link in self.sending.open_links():
            link.cut()

    def peer_died(self, peer: Worker) -> None:
        for link in self.sending.open_links():
            if link.peer.incarnation == peer.incarnation:
                link.cut()


class DecodeSide(Worker):
    """A decode worker."""

    def _role(self) -> DecodeRole:
        from kv_sim.receiving import Receiving

        shape = self.shape
        self.receiving = Receiving(self)
        batch = DecodeBatch(
            self.sequences, self.stepper, OpenGate(), shape.max_batch_tokens, MAX_SEQS
        )
        self.ledger = Ledger(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_model_len=MAX_MODEL_LEN,
            growth_tokens=self.world.setup.growth_tokens,
        )
        self.wire = self.world.random.choice(("float32", "float64", "bfloat16"))
        return DecodeRole(
            self.sequences,
            self.ledger,
            batch,
            self.receiving,
            OpenGate(),
            reserve_queue=4,
            wire=self.wire,
            num_host_slots=self.kv.num_host_slots,
        )

    @property
    def endpoint(self) -> str:
        return f"sim:{self.shape.name}"

    def target(self, granted: pb.Granted) -> pb.Target:
        """What the router tells a prefill worker."""
        return pb.Target(
            endpoints=endpoint_messages([[self.endpoint]]),
            lease=granted.lease,
            cached_tokens=granted.cached_tokens,
            layout=layout_message(self.layout),
            peer=self.incarnation,
            wire=self.wire,
            root_hash=ROOT,
        )

    def kv_at_rest(self) -> str:
        return self.receiving.at_rest()

    def cut_links(self) -> None:
        for link in self.receiving.links:
            link.cut()

    def peer_died(self, peer: Worker) -> None:
        for link in self.receiving.links:
            if link.peer == peer.incarnation:
                link.cut()
