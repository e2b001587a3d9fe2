"""What the lease table says about an offer or a slab, and what it is told about a scatter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.jobs import Reason, ReceiveJob


@dataclass(frozen=True, slots=True)
class Source:
    """The link that an offer or a slab came by."""

    peer: Incarnation
    rank: int
    """Of the peer."""
    transport: str
    wake: Callable[[], None]
    """Make the link look at its leases again."""


class Answer(Enum):
    """What to tell the sender."""

    SCATTER = auto()
    """Nothing yet: the slab is claimed; scatter it, then settle."""
    WAIT = auto()
    """Nothing yet: another slab of the lease is being scattered; the link is woken after it."""
    ACK = auto()
    RESEND = auto()
    COMPLETE = auto()
    ABORT = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The table's decision about an offer or a slab."""

    answer: Answer
    reason: Reason | None = None
    detail: str = ""
    job: ReceiveJob | None = None
    """There when the slab is claimed."""
    is_last: bool = False
    """This slab completed the lease."""


class Outcome(Enum):
    """How a scatter went."""

    VERIFIED = auto()
    DAMAGED = auto()
    STALE = auto()
    BROKEN = auto()
