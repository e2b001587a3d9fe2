"""One process of the transfer bench: sender and receivers as workers have them, run by orders."""

from __future__ import annotations

import queue
import time
from collections import deque
from multiprocessing.connection import Connection

import torch

from kvferry.bench.transfer_cache import BenchCache
from kvferry.bench.transfer_copy import Copies
from kvferry.bench.transfer_orders import (
    Answer,
    Copied,
    Copy,
    Done,
    Expect,
    Load,
    Loaded,
    Open,
    Opened,
    Order,
    Prefill,
    Send,
    Sent,
    Usage,
    Used,
    decode_order,
    encode,
)
from kvferry.bench.transfer_prefill import PEER, Prompts, attempt
from kvferry.core.errors import TransferFailed
from kvferry.core.ids import AttemptKey, LeaseId
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import BlockTable, ReceiveJob, SendDone, SendEvent, SendJob
from kvferry.kv_transfer.memory import KvMemory
from kvferry.kv_transfer.push import Push
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender

LEASE_S = 300.0
TRANSFER_TIMEOUT_S = 60.0


def serve(pipe: Connection, secret: bytes) -> None:
    """The process: follow orders until the other end of the pipe is closed."""
    torch.set_num_threads(1)
    side = Side(secret)
    try:
        while True:
            pipe.send_bytes(encode(side.follow(decode_order(pipe.recv_bytes()))))
    except EOFError:
        return
    finally:
        side.close()


class Side:
    """One cache with its senders and receivers, one of each per transport."""

    def __init__(self, secret: bytes) -> None:
        self._options = LinkOptions(secret=secret, incarnation=PEER, expected_links=1)
        self._memory: KvMemory | None = None
        self._blocks: BlockTable | None = None
        self._copies: Copies | None = None
        self._prompts: Prompts | None = None
        self._receivers: dict[str, KvReceiver] = {}
        self._senders: dict[str, KvSender] = {}
        self._ended: queue.Queue[SendEvent] = queue.Queue()

    def follow(self, order: Order) -> Answer:
        match order:
            case Open():
                return self._open(order)
            case Expect():
                return self._expect(order)
            case Send():
                return self._send(order)
            case Copy():
                assert self._copies is not None
                rate = self._copies.rate(order.copying, order.walk, order.seconds)
                return Copied(bytes_per_s=rate)
            case Load():
                return self._load(order)
            case Prefill():
                assert self._prompts is not None
                return self._prompts.run(order)
            case Usage():
                return Used(cpu_s=time.process_time())

    def close(self) -> None:
        if self._prompts is not None:
            self._prompts.close()
        for sender in self._senders.values():
            sender.close()
        for receiver in self._receivers.values():
            receiver.close()
        self._senders.clear()
        self._receivers.clear()

    def _open(self, order: Open) -> Opened:
        self.close()
        # The memory of the last cache goes before the next one takes as much.
        self._memory = self._blocks = self._copies = self._prompts = None
        cache = BenchCache(order.layout, order.tokens, order.order, order.copier)
        self._blocks, self._memory = cache.blocks, cache.memory
        self._copies = Copies(cache, self._options.slab_bytes)
        for name in order.transports:
            self._receivers[name] = KvReceiver(
                self._memory, self._options, lambda event: None, [listen(name)]
            )
        return Opened(
            endpoints={name: receiver.endpoints[0] for name, receiver in self._receivers.items()}
        )

    def _load(self, order: Load) -> Loaded:
        self.close()
        self._prompts = Prompts(order, self._options)
        return Loaded(layout=self._prompts.layout)

    def _expect(self, order: Expect) -> Done:
        assert self._blocks is not None
        for number in range(order.first, order.first + order.count):
            self._receivers[order.transport].expect(
                ReceiveJob(
                    key=attempt(number),
                    lease=LeaseId(number),
                    wire=order.wire,
                    tokens=order.walk.part(number),
                    blocks=self._blocks,
                    deadline_s=time.monotonic() + LEASE_S,
                )
            )
        return Done()

    def _send(self, order: Send) -> Sent:
        waiting = deque(range(order.first, order.first + order.count))
        begun: dict[AttemptKey, float] = {}
        latencies = []
        started = time.perf_counter()
        while waiting or begun:
            while waiting and len(begun) < order.window:
                number = waiting.popleft()
                begun[attempt(number)] = time.perf_counter()
                self._sender(order.transport).send(self._job(order, number))
            event = self._ended.get(timeout=TRANSFER_TIMEOUT_S)
            if not isinstance(event, SendDone):
                raise TransferFailed(f"{order.transport}: {event}")
            latencies.append(time.perf_counter() - begun.pop(event.key))
        return Sent(latencies_s=latencies, wall_s=time.perf_counter() - started)

    def _job(self, order: Send, number: int) -> SendJob:
        assert self._blocks is not None
        return SendJob(
            key=attempt(number),
            peer=PEER,
            endpoints=(order.endpoint,),
            lease=LeaseId(number),
            target=order.target,
            wire=order.wire,
            tokens=order.walk.part(number),
            blocks=self._blocks,
        )

    def _sender(self, transport: str) -> KvSender:
        if transport not in self._senders:
            assert self._memory is not None
            self._senders[transport] = KvSender(
                self._memory,
                self._options,
                self._ended.put,
                push=Push.WHOLE,
                choices=Choices(forced=transport, trusted_network=True),
            )
        return self._senders[transport]
