"""What the lease table says about an offer or a slab, and what it is told about a scatter."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvferry.kv_transfer.jobs import Reason, ReceiveJob


class Answer(Enum):
    """What to tell the sender."""

    SCATTER = auto()
    """Nothing yet: the slab is claimed; scatter it, then settle."""
    ACK = auto()
    RESEND = auto()
    COMPLETE = auto()
    ABORT = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The table's decision about an offer or a slab. ``job`` is there when the slab is claimed."""

    answer: Answer
    reason: Reason | None = None
    detail: str = ""
    job: ReceiveJob | None = None


class Outcome(Enum):
    """How a scatter went."""

    VERIFIED = auto()
    DAMAGED = auto()
    STALE = auto()
    BROKEN = auto()
