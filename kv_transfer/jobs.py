"""What the engine asks of the KV plane, and what it hears back.

For each ``SendJob`` and each ``ReceiveJob`` exactly one terminal event is delivered, and only when
no pack or scatter of it is running any more: until then its blocks stay fenced. Events may be
delivered on any thread, that of the caller of abort or release included; the handler must only
enqueue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId
from kvferry.core.span import Span
from kvferry.kv_transfer.layout import KvLayout


class Reason(StrEnum):
    """Why a transfer failed, or why an offer or a slab was dropped and counted."""

    ABORTED = "aborted"
    """The peer gave the transfer up."""
    UNKNOWN = "unknown"
    """No such lease."""
    ENDED = "ended"
    """The lease has ended."""
    STALE = "stale"
    """Another attempt, or a block that was given away since."""
    DUPLICATE = "duplicate"
    """The slab had arrived already."""
    FOREIGN = "foreign"
    """The slab memory was not granted for this."""
    DAMAGED = "damaged"
    """The digest does not match the bytes."""
    MISMATCH = "mismatch"
    """Layout, KV flavour, content hash or range differ from what the lease is for."""
    TIMEOUT = "timeout"
    """No progress."""
    DEADLINE = "deadline"
    REFUSED = "refused"
    """The peer is gone or will not have us."""
    CLOSED = "closed"
    """This side is shutting down."""
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The blocks of a sequence from its first token, with their generations when leased."""

    block_ids: NDArray[np.int32]
    """[num_blocks]"""
    generations: NDArray[np.uint32]
    """[num_blocks]"""

    def is_fresh(self, live: NDArray[np.uint32], tokens: Span, block_size: int) -> bool:
        """Whether all blocks of a token range still have their generation in the live array."""
        part = slice(tokens.begin // block_size, -(-tokens.end // block_size))
        found = live.take(self.block_ids[part])
        # Of few blocks the bytes are compared sooner than the numbers.
        return found.tobytes() == self.generations[part].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SendJob:
    """Ship the KV of tokens [begin, end) to a lease of one rank of a receiver."""

    key: AttemptKey
    peer: Incarnation
    """The receiving worker's, as the router says: with the rank it names the link."""
    endpoints: tuple[str, ...]
    """Where that rank receives, one per transport."""
    lease: LeaseId
    target: KvLayout
    target_rank: int = 0
    wire: str
    """Element type of the slabs, as the receiver wants it."""
    tokens: Span
    blocks: BlockTable
    chain_hash: bytes = b""
    """Chain hash of the last full block before ``tokens.end``, in the target's block size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveJob:
    """Accept the KV of tokens [begin, end), of this rank's shard, into leased blocks."""

    key: AttemptKey
    lease: LeaseId
    wire: str
    """Element type that the slabs must have."""
    tokens: Span
    blocks: BlockTable
    deadline_s: float
    """On the receiver's own clock."""
    chain_hash: bytes = b""
    """What the sender must present; see ``SendJob``."""


@dataclass(slots=True)
class Account:
    """What one side of a transfer did. Bytes and seconds of the same operations, so that
    ``nbytes / busy_s`` is the rate of the packs, or of the scatters: resends are in both.
    """

    transport: str = ""
    nbytes: int = 0
    busy_s: float = 0.0
    wire_s: float = 0.0
    """Sender: bytes in flight, summed over slabs."""
    credit_s: float = 0.0
    """Sender: with a slab's bytes ready and no memory granted for it."""
    wall_s: float = 0.0
    """From the first slab that stood ready to the last acknowledgement; or, on the receiver, from
    the first offer to the last scatter."""
    exposed_s: float = 0.0
    """Sender: the part of it after all was computed."""
    resends: int = 0


@dataclass(frozen=True, slots=True)
class SendDone:
    """The receiver verified every slab."""

    key: AttemptKey
    account: Account


@dataclass(frozen=True, slots=True)
class SendFailed:
    """The attempt is over; nothing of it may be used."""

    key: AttemptKey
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SendAborted:
    """``abort`` came first."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class ReceiveDone:
    """All is verified and in the blocks."""

    key: AttemptKey
    lease: LeaseId
    account: Account


@dataclass(frozen=True, slots=True)
class ReceiveFailed:
    """The lease is over; what was scattered is not to be used."""

    key: AttemptKey
    lease: LeaseId
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReceiveClosed:
    """``release`` came first."""

    key: AttemptKey
    lease: LeaseId


SendEvent = SendDone | SendFailed | SendAborted
ReceiveEvent = ReceiveDone | ReceiveFailed | ReceiveClosed
