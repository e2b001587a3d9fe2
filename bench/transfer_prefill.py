"""Prompts that are computed while their KV is sent: the transfer bench's sender with a model."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.transfer_orders import Load, Prefill, Prefilled
from kvferry.core.config import parse_config
from kvferry.core.errors import TransferFailed
from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.engine.loading import load_backend
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import BlockTable, SendDone, SendEvent, SendJob
from kvferry.kv_transfer.memory import PagedKvMemory
from kvferry.kv_transfer.push import Push
from kvferry.kv_transfer.sender import KvSender
from kvferry.kv_transfer.wire import layout_of
from kvferry.models.spec import read_spec

PEER = Incarnation(1)
_ROUTER = Incarnation(2)
TIMEOUT_S = 60.0


class Prompts:
    """A model, its cache, and a sender for each way to push."""

    def __init__(self, order: Load, options: LinkOptions) -> None:
        folder = Path(order.folder)
        config = parse_config(
            {
                "model": {"dtype": "float32"},
                "prefill": {"threads": order.threads, "max_batch_tokens": order.tokens},
            }
        )
        vocab_size = read_spec(folder).vocab_size
        backend = load_backend(folder, vocab_size, config.model, config.prefill, "prefill")
        torch.set_num_threads(order.threads)
        self.layout = layout_of(backend.kv)
        self._runner = backend.runner
        self._vocab_size = vocab_size
        self._draw = np.random.default_rng(0)
        self._generations = np.zeros(backend.kv.num_blocks, np.uint32)
        self._memory = PagedKvMemory(backend.kv.slots, self.layout, self._generations)
        self._options = options
        self._senders: dict[str, KvSender] = {}
        self._ended: queue.Queue[SendEvent] = queue.Queue()

    def run(self, order: Prefill) -> Prefilled:
        """One prompt in one step. Raises TransferFailed."""
        sender = self._sender(order.push, order.transport)
        job = self._job(order)

        def layer_done(layers: int, event: object) -> None:
            sender.computed(job.key, layers, order.tokens, event)

        started = time.perf_counter()
        sender.begin(job)
        self._runner.execute(self._plan(order.tokens), layer_done)
        computed = time.perf_counter()
        sender.computed(job.key, self.layout.num_layers, order.tokens)
        event = self._ended.get(timeout=TIMEOUT_S)
        ended = time.perf_counter()
        if not isinstance(event, SendDone):
            raise TransferFailed(f"{order.transport}: {event}")
        return Prefilled(
            compute_s=computed - started,
            total_s=max(computed, ended) - started,
            exposed_s=event.account.exposed_s,
            wall_s=event.account.wall_s,
        )

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()

    def _sender(self, push: str, transport: str) -> KvSender:
        if push not in self._senders:
            self._senders[push] = KvSender(
                self._memory,
                self._options,
                self._ended.put,
                push=Push(push),
                choices=Choices(forced=transport, trusted_network=True),
            )
        return self._senders[push]

    def _job(self, order: Prefill) -> SendJob:
        blocks = np.arange(-(-order.tokens // self.layout.block_size), dtype=np.int32)
        return SendJob(
            key=attempt(order.number),
            peer=PEER,
            endpoints=(order.endpoint,),
            lease=LeaseId(order.number),
            target=self.layout,
            wire=self.layout.dtype,
            tokens=Span(0, order.tokens),
            blocks=BlockTable(block_ids=blocks, generations=self._generations[blocks]),
        )

    def _plan(self, tokens: int) -> StepPlan:
        blocks = np.arange(-(-tokens // self.layout.block_size), dtype=np.int32)
        return StepPlan(
            step=0,
            token_ids=self._draw.integers(0, self._vocab_size, tokens),
            query_lens=np.array([tokens], np.int32),
            context_lens=np.zeros(1, np.int32),
            block_tables=blocks[None, :],
            sampled=np.zeros(1, np.int32),
            sampling=SamplingRows.greedy(1),
        )


def attempt(number: int) -> AttemptKey:
    return AttemptKey(_ROUTER, RequestId(number), 1)
