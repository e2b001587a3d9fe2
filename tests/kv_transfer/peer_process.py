"""One side of a link in a process of its own, for tests that kill it.

    peer_process.py sender ENDPOINT STOP_AT     sends leases 1 and 2
    peer_process.py receiver - STOP_AT          expects leases 1 and 2; prints its endpoint

STOP_AT: the pack (sender) or scatter (receiver), counted from 0, at which it says "stopped" and
waits for ever. -1: never; it says "done" after the last event. All caches are those of
``peer_cache``.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import BlockTable, ReceiveJob, SendJob
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.memory import PagedKvMemory
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender

TOKENS = Span(5, 400)
NUM_LEASES = 2
INCARNATION = Incarnation(1)


def options() -> LinkOptions:
    return LinkOptions(
        secret=b"p" * 32,
        incarnation=INCARNATION,
        slab_bytes=16384,
        staging_bytes=1 << 20,
        beat_s=0.2,
        silence_s=1.0,
        progress_timeout_s=1.0,
    )


def peer_cache(block_size: int, fill: bool) -> tuple[torch.Tensor, PagedKvMemory, BlockTable]:
    """(slots, memory, block table), the same in every process that asks for the same."""
    num_blocks = -(-TOKENS.end // block_size)
    layout = KvLayout(
        num_layers=4, num_kv_heads=2, head_dim=16, block_size=block_size, dtype="float32"
    )
    rng = np.random.default_rng(5)
    shape = (4, 2, num_blocks * block_size, 2, 16)
    values = rng.standard_normal(shape, dtype=np.float32) if fill else np.zeros(shape, np.float32)
    slots = torch.from_numpy(values)
    generations = np.ones(num_blocks, np.uint32)
    blocks = BlockTable(
        block_ids=rng.permutation(num_blocks).astype(np.int32), generations=generations.copy()
    )
    return slots, PagedKvMemory(slots, layout, generations), blocks


def key(lease: int) -> AttemptKey:
    return AttemptKey(Incarnation(2), RequestId(lease), 1)


def send_job(memory: Any, blocks: BlockTable, endpoint: str, lease: int) -> SendJob:
    return SendJob(
        key=key(lease),
        peer=INCARNATION,
        endpoints=(endpoint,),
        lease=LeaseId(lease),
        target=memory.layout,
        wire="float32",
        tokens=TOKENS,
        blocks=blocks,
    )


def receive_job(blocks: BlockTable, lease: int, seconds: float) -> ReceiveJob:
    deadline_s = time.monotonic() + seconds
    return ReceiveJob(
        key=key(lease),
        lease=LeaseId(lease),
        wire="float32",
        tokens=TOKENS,
        blocks=blocks,
        deadline_s=deadline_s,
    )


class StoppingMemory:
    """A memory that stops the process's work at one of its copies."""

    def __init__(self, memory: PagedKvMemory, stop_at: int) -> None:
        self._memory, self._left = memory, stop_at
        self.layout, self.is_fresh = memory.layout, memory.is_fresh
        self.rank, self.digests = memory.rank, memory.digests

    def pack(self, *arguments: Any) -> list[int]:
        self._count()
        return self._memory.pack(*arguments)

    def scatter(self, *arguments: Any) -> list[int]:
        self._count()
        return self._memory.scatter(*arguments)

    def followed_from(self, *_: object) -> None: ...

    def _count(self) -> None:
        if self._left == 0:
            print("stopped", flush=True)
            threading.Event().wait()
        self._left -= 1


def main(role: str, endpoint: str, stop_at: int) -> None:
    torch.set_num_threads(1)
    events: queue.Queue[object] = queue.Queue()
    _, memory, blocks = peer_cache(4 if role == "sender" else 16, fill=role == "sender")
    stopping = StoppingMemory(memory, stop_at)
    if role == "sender":
        sender = KvSender(stopping, options(), events.put)
        for lease in range(1, NUM_LEASES + 1):
            sender.send(send_job(memory, blocks, endpoint, lease))
        peer: Any = sender
    else:
        receiver = KvReceiver(stopping, options(), events.put, [listen("shm")])
        for lease in range(1, NUM_LEASES + 1):
            receiver.expect(receive_job(blocks, lease, 60.0))
        print(receiver.endpoints[0], flush=True)
        peer = receiver
    for _ in range(NUM_LEASES):
        print(type(events.get(timeout=60.0)).__name__, flush=True)
    print("done", flush=True)
    sys.stdin.read()
    peer.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
