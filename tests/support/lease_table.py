"""A receiver's lease table on a virtual clock, for tests of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import BlockTable, Reason, ReceiveFailed, ReceiveJob
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.messages import Offer, SlabHeader
from kvferry.kv_transfer.plan import SlabMove, cut
from kvferry.kv_transfer.states import State
from kvferry.kv_transfer.verdicts import Answer, Outcome, Source, Verdict

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
TOKENS = Span(3, 11)
MOVES = cut(LAYOUT.whole, TOKENS, LAYOUT.head_bytes, LAYOUT.token_bytes * 2)
NBYTES = TOKENS.length * LAYOUT.token_bytes
BLOCKS = BlockTable(block_ids=np.arange(3, dtype=np.int32), generations=np.zeros(3, np.uint32))
ONE = LeaseId(1)
PEER = Incarnation(5)


def key(attempt: int = 1) -> AttemptKey:
    return AttemptKey(Incarnation(1), RequestId(1), attempt)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Wakes:
    """A link as the table sees it."""

    def __init__(self, peer: Incarnation = PEER, rank: int = 0) -> None:
        self.count = 0
        self.source = Source(peer, rank, "loopback", self._wake)

    def _wake(self) -> None:
        self.count += 1


def header(move: SlabMove, attempt: int = 1, **changes: Any) -> SlabHeader:
    values = {
        "key": key(attempt),
        "lease": 1,
        "index": move.index,
        "layers": move.layers,
        "heads": move.heads,
        "tokens": move.tokens,
        "wire": "float32",
        "chain_hash": b"h",
        "nbytes": move.nbytes,
        "digests": [0],
    }
    return SlabHeader(**(values | changes))


def offer(nbytes: int = NBYTES, attempt: int = 1, lease: int = 1, ranks: int = 1) -> Offer:
    return Offer(key=key(attempt), lease=lease, slabs=1, nbytes=nbytes, ranks=ranks)


class Leases:
    """A lease table, its clock and what it said."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.events: list[object] = []
        self.table = LeaseTable(LAYOUT, 0, self.events.append, self.clock)
        self.link = Wakes()

    def expect(self, attempt: int = 1, lease: int = 1) -> None:
        self.table.expect(
            ReceiveJob(
                key=key(attempt),
                lease=LeaseId(lease),
                wire="float32",
                tokens=TOKENS,
                blocks=BLOCKS,
                deadline_s=110.0,
                chain_hash=b"h",
            )
        )

    def offer(self, link: Wakes | None = None, **changes: Any) -> Verdict:
        return self.table.offered((link or self.link).source, offer(**changes))

    def claim(self, move: int, link: Wakes | None = None, **changes: Any) -> Answer:
        slab = header(MOVES[move], **changes)
        return self.table.claim((link or self.link).source, slab).answer

    def settle(
        self, index: int, outcome: Outcome = Outcome.VERIFIED, link: Wakes | None = None
    ) -> Verdict:
        source = (link or self.link).source
        return self.table.settle(source, header(MOVES[index]), outcome, 0.5)

    def state(self) -> State | None:
        return self.table.state(ONE)


def failed(reason: Reason, detail: str = "") -> ReceiveFailed:
    return ReceiveFailed(key(), ONE, reason, detail)
