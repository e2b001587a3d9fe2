"""What the router knows of each worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.core.dtypes import kv_flavour
from kvferry.proto import worker_pb2 as pb


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class WorkerState(StrEnum):
    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    """Routable; the snapshot of its cache is not complete yet."""
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    """It does not fit the others; ``reason`` says why."""


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker as the router sees it, its own count of what it has dispatched there included."""

    number: int
    """Small and unique: its bit in the prefix index."""
    address: str
    role: Role
    worker_id: str = ""
    state: WorkerState = WorkerState.CONNECTING
    reason: str = "not connected yet"
    hello: pb.WorkerHello = field(default_factory=pb.WorkerHello)
    load: pb.Load = field(default_factory=pb.Load)
    prompts: list[int] = field(default_factory=list)
    """Lengths of the prompts dispatched to it that have no first token yet."""
    reserving: int = 0
    """Reservations asked of it and not answered yet."""
    active: int = 0
    """Requests that hold a lease on it, or ask for one."""

    @property
    def routable(self) -> bool:
        return self.state in (WorkerState.CATCHING_UP, WorkerState.READY)

    @property
    def prefill_tokens(self) -> int:
        return sum(self.prompts)

    def takes_prompt(self, num_tokens: int) -> bool:
        """Whether less than one full step of work is before such a prompt, so that it may look
        ahead. Shorter ones are computed first.
        """
        before = sum(length for length in self.prompts if length <= num_tokens)
        return self.routable and before < max(self.hello.max_batch_tokens, 1)

    @property
    def keeps_exact_kv(self) -> bool:
        """Whether its cache holds what it would compute itself: KV that comes from outside loses
        nothing on its way.
        """
        own = self.hello.layout.dtype
        return kv_flavour(own, self.hello.kv_wire) == own

    @property
    def takes_reservations(self) -> bool:
        """It has answered all but one of its reservations, and has rows left."""
        return self.routable and self.reserving < 2 and self.active < self.hello.max_batch_seqs
