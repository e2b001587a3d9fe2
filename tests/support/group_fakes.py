"""Senders, receivers and jobs for tests of transfers that several ranks take part in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.core.errors import RankLost
from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.group.orders import (
    Order,
    decode_order,
)
from kvferry.kv_transfer.group.rank import ReceiverRank, SenderRank
from kvferry.kv_transfer.jobs import (
    Account,
    BlockTable,
    Reason,
    ReceiveJob,
    SendEvent,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout

KEY = AttemptKey(Incarnation(1 << 62), RequestId(2), 1)
LEASE = LeaseId(9)
NUM_LAYERS = 3
LAYOUT = KvLayout(
    num_layers=NUM_LAYERS, num_kv_heads=4, head_dim=8, block_size=4, dtype="float32", tp=2
)


def account(nbytes: int = 10, wall_s: float = 1.0, transport: str = "shm") -> Account:
    return Account(transport=transport, nbytes=nbytes, busy_s=0.5, wall_s=wall_s)


def table(*block_ids: int) -> BlockTable:
    return BlockTable(
        block_ids=np.array(block_ids, np.int32),
        generations=np.array([7] * len(block_ids), np.uint32),
    )


def send_job(rank: int = 0) -> SendJob:
    return SendJob(
        key=KEY,
        peer=Incarnation(4),
        endpoints=(f"tcp:{rank}",),
        lease=LEASE,
        target=LAYOUT,
        target_rank=rank,
        wire="float32",
        tokens=Span(0, 8),
        blocks=table(3, 5),
    )


def receive_job() -> ReceiveJob:
    return ReceiveJob(
        key=KEY,
        lease=LEASE,
        wire="float32",
        tokens=Span(0, 8),
        blocks=table(3, 5),
        deadline_s=5.0,
        chain_hash=b"chain",
    )


class FakeSender:
    """Notes calls; the test decides how transfers end."""

    def __init__(self, on_event: Callable[[SendEvent], None]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.end = on_event

    def begin(self, job: SendJob) -> None:
        self.calls.append(("begin", job.target_rank))

    def computed(
        self, key: AttemptKey, layers_end: int, tokens_end: int, after: object = None
    ) -> None:
        self.calls.append(("computed", layers_end, tokens_end))

    def abort(self, key: AttemptKey) -> None:
        self.calls.append(("abort",))


class FakeReceiver:
    endpoints = ("shm:0",)

    def __init__(self, on_event: Callable[[Any], None]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.end = on_event
        self.counters = Counter({Reason.DAMAGED: 1})
        self.tallies: Counter[str] = Counter()

    def expect(self, job: ReceiveJob) -> None:
        self.calls.append(("expect", job))

    def renew(self, lease: LeaseId, deadline_s: float) -> None:
        self.calls.append(("renew", deadline_s))

    def release(self, lease: LeaseId) -> None:
        self.calls.append(("release",))


class Wire:
    """Orders to the other ranks, as bytes, and the planes at their ends."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.generations = np.zeros(num_blocks, np.uint32)
        self.sent: list[Order] = []
        self.planes: list[SenderRank | ReceiverRank] = []
        self.is_cut = False

    def send(self, payload: bytes) -> None:
        if self.is_cut:
            raise RankLost("cut")
        self.sent.append(decode_order(payload))
        for plane in self.planes:
            plane.handle(payload)
