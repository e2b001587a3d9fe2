"""A pair of workers' KV planes in one process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.choices import Choices
from kvferry.kv_transfer.endpoints import connect as connect_any
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import (
    BlockTable,
    Reason,
    ReceiveDone,
    ReceiveFailed,
    ReceiveJob,
    SendDone,
    SendFailed,
    SendJob,
)
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.memory import PagedKvMemory
from kvferry.kv_transfer.push import Push
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender
from kvferry.kv_transfer.transport import Connect

torch.set_num_threads(1)

SECRET = b"s" * 32
RECEIVER = Incarnation(7)


def make_options(secret: bytes = SECRET, **changes: Any) -> LinkOptions:
    """Small slabs and short timeouts."""
    values: dict[str, Any] = {
        "incarnation": RECEIVER,
        "slab_bytes": 8192,
        "staging_bytes": 1 << 20,
        "progress_timeout_s": 2.0,
        "beat_s": 0.2,
        "silence_s": 2.0,
        "expected_links": 32,
    }
    return LinkOptions(secret=secret, **(values | changes))


def make_layout(block_size: int, **changes: Any) -> KvLayout:
    values: dict[str, Any] = {
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
    }
    return KvLayout(block_size=block_size, **(values | changes))


class Cache:
    """A paged cache with a shuffled block table for one sequence."""

    def __init__(self, layout: KvLayout, num_tokens: int, seed: int, fill: bool) -> None:
        rng = np.random.default_rng(seed)
        needed = -(-num_tokens // layout.block_size)
        num_blocks = needed + 3
        shard = layout.shard(0)
        shape = (
            shard.layers.length,
            2,
            num_blocks * layout.block_size,
            shard.heads.length,
            layout.head_dim,
        )
        dtype = getattr(torch, layout.dtype)
        self.slots = torch.zeros(shape, dtype=dtype)
        if fill:
            noise = rng.integers(0, 256, self.slots.nbytes, dtype=np.uint8)
            self.slots.view(torch.uint8).view(-1).copy_(torch.from_numpy(noise))
        self.layout = layout
        self.generations = rng.integers(0, 2**32, num_blocks, dtype=np.uint32)
        ids = rng.permutation(num_blocks)[:needed].astype(np.int32)
        self.blocks = BlockTable(block_ids=ids, generations=self.generations[ids].copy())
        self.memory = PagedKvMemory(self.slots, layout, self.generations)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """[L, 2, tokens, H, D] bytes, token by token: the slice-and-cat reference."""
        block_size = self.layout.block_size
        parts = []
        for token in range(begin, end):
            slot = int(self.blocks.block_ids[token // block_size]) * block_size
            slot += token % block_size
            parts.append(self.slots[:, :, slot : slot + 1])
        return torch.cat(parts, dim=2).contiguous().view(torch.uint8)


class Events:
    """Collects terminal events."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def __call__(self, event: Any) -> None:
        self._queue.put(event)

    def next(self, timeout_s: float = 20.0) -> Any:
        return self._queue.get(timeout=timeout_s)

    def assert_none(self, within_s: float = 0.02) -> None:
        with pytest.raises(queue.Empty):
            self._queue.get(timeout=within_s)


@dataclass
class Pair:
    """A sender and a receiver with one sequence's cache on each side."""

    source: Cache
    target: Cache
    sender: KvSender
    receiver: KvReceiver
    sent: Events
    received: Events
    options: LinkOptions
    tokens: Span
    probed: queue.Queue[Any]
    """What the sender's probes found."""

    def key(self, request: int = 1, attempt: int = 1) -> AttemptKey:
        return AttemptKey(Incarnation(9), RequestId(request), attempt)

    def send(self, **changes: Any) -> None:
        self.sender.send(self.job(**changes))

    def begin(self, **changes: Any) -> None:
        """Nothing is computed yet."""
        self.sender.begin(self.job(**changes))

    def job(self, lease: int = 1, request: int = 1, attempt: int = 1, **changes: Any) -> SendJob:
        values: dict[str, Any] = {
            "peer": RECEIVER,
            "endpoints": self.receiver.endpoints,
            "target": self.target.layout,
            "wire": self.target.layout.dtype,
            "tokens": self.tokens,
            "blocks": self.source.blocks,
            "chain_hash": b"h" * 16,
        }
        values |= changes
        return SendJob(key=self.key(request, attempt), lease=LeaseId(lease), **values)

    def expect(self, lease: int = 1, request: int = 1, attempt: int = 1, **changes: Any) -> None:
        values: dict[str, Any] = {
            "wire": self.target.layout.dtype,
            "tokens": self.tokens,
            "blocks": self.target.blocks,
            "deadline_s": time.monotonic() + 60,
            "chain_hash": b"h" * 16,
        }
        values |= changes
        self.receiver.expect(
            ReceiveJob(key=self.key(request, attempt), lease=LeaseId(lease), **values)
        )

    def assert_equal(self) -> None:
        ours = self.source.read(*self.tokens)
        assert torch.equal(ours, self.target.read(*self.tokens))

    def assert_both_done(self) -> tuple[ReceiveDone, SendDone]:
        """Both sides say so, and nothing else."""
        received, sent = self.received.next(), self.sent.next()
        assert isinstance(received, ReceiveDone)
        assert isinstance(sent, SendDone)
        self.assert_equal()
        self.received.assert_none()
        self.sent.assert_none()
        return received, sent

    def assert_both_failed(self, received: Reason, sent: Reason) -> None:
        """Both sides say so, and nothing else."""
        event = self.received.next()
        assert (type(event), event.reason) == (ReceiveFailed, received)
        event = self.sent.next()
        assert (type(event), event.reason) == (SendFailed, sent)
        self.received.assert_none()
        self.sent.assert_none()

    def assert_works(self, **ids: int) -> None:
        """The next good transfer succeeds."""
        self.expect(**ids)
        self.send(**ids)
        self.assert_both_done()


@dataclass
class PairFactory:
    """Makes pairs and closes them at the end of the test."""

    transport: str
    made: list[Pair] = field(default_factory=list)

    def __call__(
        self,
        source_block: int = 4,
        target_block: int = 16,
        tokens: Span = Span(5, 150),  # noqa: B008
        *,
        wrap: Callable[[Any], Any] = lambda channel: channel,
        wrap_source: Callable[[Any], Any] = lambda memory: memory,
        wrap_target: Callable[[Any], Any] = lambda memory: memory,
        source_layout: dict[str, Any] | None = None,
        target_layout: dict[str, Any] | None = None,
        push: Push = Push.AUTO,
        choices: Choices | None = None,
        connect: Connect = connect_any,
        also: Sequence[str] = (),
        **options: Any,
    ) -> Pair:
        source_shape = make_layout(source_block, **(source_layout or {}))
        source = Cache(source_shape, tokens.end, 1, fill=True)
        layout = make_layout(target_block, **(target_layout or {}))
        target = Cache(layout, tokens.end, 2, fill=False)
        sent, received = Events(), Events()
        link_options = make_options(**options)
        receiver = KvReceiver(
            wrap_target(target.memory),
            link_options,
            received,
            [listen(name) for name in (self.transport, *also)],
        )
        probed: queue.Queue[Any] = queue.Queue()
        sender = KvSender(
            wrap_source(source.memory),
            link_options,
            sent,
            lambda endpoint, timeout_s: wrap(connect(endpoint, timeout_s)),
            push=push,
            choices=choices or Choices(trusted_network=True),
            on_probed=probed.put,
        )
        pair = Pair(source, target, sender, receiver, sent, received, link_options, tokens, probed)
        self.made.append(pair)
        return pair

    def close(self) -> None:
        for pair in self.made:
            pair.sender.close()
            pair.receiver.close()


@pytest.fixture
def pairs_over() -> Iterator[Callable[[str], PairFactory]]:
    """Factories by the name of the transport."""
    factories: list[PairFactory] = []

    def over(transport: str) -> PairFactory:
        factories.append(PairFactory(transport))
        return factories[-1]

    yield over
    for factory in factories:
        factory.close()


@pytest.fixture(params=["loopback", "shm"])
def make_pair(
    request: pytest.FixtureRequest, pairs_over: Callable[[str], PairFactory]
) -> PairFactory:
    return pairs_over(request.param)


@pytest.fixture
def make_shm_pair(pairs_over: Callable[[str], PairFactory]) -> PairFactory:
    return pairs_over("shm")


@pytest.fixture
def make_loopback_pair(pairs_over: Callable[[str], PairFactory]) -> PairFactory:
    return pairs_over("loopback")


@pytest.fixture(scope="session", name="pair_factory")
def factory_of_pairs() -> type[PairFactory]:
    return PairFactory


@pytest.fixture(scope="session", name="make_cache")
def cache_factory() -> type[Cache]:
    return Cache


@pytest.fixture(scope="session", name="make_options")
def options_factory() -> Callable[..., LinkOptions]:
    return make_options


@pytest.fixture(scope="session", name="make_layout")
def layout_factory() -> Callable[..., KvLayout]:
    return make_layout
