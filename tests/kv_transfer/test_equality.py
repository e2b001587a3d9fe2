"""Equality with slicing and concatenating, over random splits, block sizes, types, cuts and faults.

The reference knows no plan: it holds the prompt's KV as one tensor of the whole model, and each
rank's cache as that tensor's layers and heads, token by token in the slots of its blocks.
"""

from __future__ import annotations

import queue
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.ids import AttemptKey, Incarnation, LeaseId, RequestId
from kvferry.core.span import Span
from kvferry.kv_transfer.endpoints import listen
from kvferry.kv_transfer.handshake import LinkOptions
from kvferry.kv_transfer.jobs import (
    BlockTable,
    ReceiveDone,
    ReceiveJob,
    SendDone,
    SendJob,
)
from kvferry.kv_transfer.layout import QUANTISED_BYTES, KvLayout, head_nbytes
from kvferry.kv_transfer.memory import Form, PagedKvMemory
from kvferry.kv_transfer.plan import Coverage, Cutter, parts, wire_dtype
from kvferry.kv_transfer.receiver import KvReceiver
from kvferry.kv_transfer.sender import KvSender

FLOATS = ["float64", "float32", "bfloat16", "float16"]
RANKS = [1, 2, 3, 4, 8]


class RankCache:
    """One rank's cache with one sequence in it, which the reference writes and reads."""

    def __init__(self, layout: KvLayout, rank: int, num_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layout, self.shard = layout, layout.shard(rank)
        needed = -(-num_tokens // layout.block_size)
        num_blocks = needed + 2
        shape = (self.shard.layers.length, 2, num_blocks * layout.block_size)
        shape += (self.shard.heads.length,)
        noise = torch.from_numpy(rng.integers(0, 2, (*shape, layout.head_dim)))
        self.slots = noise.to(getattr(torch, layout.dtype))
        self.scales = torch.ones(shape) if layout.dtype in QUANTISED_BYTES else None
        self.generations = rng.integers(0, 2**32, num_blocks, dtype=np.uint32)
        ids = rng.permutation(num_blocks)[:needed].astype(np.int32)
        self.blocks = BlockTable(block_ids=ids, generations=self.generations[ids].copy())
        self.memory = PagedKvMemory(
            self.slots, layout, self.generations, rank=rank, scales=self.scales
        )

    def slot(self, token: int) -> int:
        size = self.layout.block_size
        return int(self.blocks.block_ids[token // size]) * size + token % size

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's layers and heads of [layers, 2, tokens, heads, ...]."""
        return whole[slice(*self.shard.layers), :, :, slice(*self.shard.heads)]

    def write(self, whole: torch.Tensor, scales: torch.Tensor | None) -> None:
        for token in range(whole.shape[2]):
            self.slots[:, :, self.slot(token)] = self.of(whole)[:, :, token]
            if self.scales is not None and scales is not None:
                self.scales[:, :, self.slot(token)] = self.of(scales)[:, :, token]

    def read(self, tokens: Span) -> torch.Tensor:
        slots = [self.slot(token) for token in range(*tokens)]
        return torch.stack([self.slots[:, :, slot] for slot in slots], dim=2)

    def read_scales(self, tokens: Span) -> torch.Tensor | None:
        if self.scales is None:
            return None
        slots = [self.slot(token) for token in range(*tokens)]
        return torch.stack([self.scales[:, :, slot] for slot in slots], dim=2)

    def outside(self, tokens: Span) -> torch.Tensor:
        """All slots but those of the tokens."""
        kept = torch.ones(self.slots.shape[2], dtype=torch.bool)
        kept[[self.slot(token) for token in range(*tokens)]] = False
        return self.slots[:, :, kept]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def random_kv(layout: KvLayout, num_tokens: int, seed: int) -> torch.Tensor:
    """[layers, 2, tokens, heads, head_dim] of a float type."""
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(getattr(torch, layout.dtype))


@st.composite
def layouts(draw: st.DrawFn, source_types: list[str], target_types: list[str]) -> Any:
    """A pair of layouts of one model."""
    shape = {
        "num_layers": draw(st.integers(2, 5)),
        "num_kv_heads": draw(st.integers(1, 9)),
        "head_dim": draw(st.sampled_from([4, 8, 12])),
    }
    return tuple(
        KvLayout(
            **shape,
            block_size=draw(st.sampled_from([1, 5, 8, 16, 32, 64, 256])),
            dtype=draw(st.sampled_from(types)),
            tp=draw(st.sampled_from(RANKS)),
            pp=draw(st.sampled_from([1, 2])),
        )
        for types in (source_types, target_types)
    )


@st.composite
def ranges(draw: st.DrawFn) -> Span:
    begin = draw(st.integers(0, 40))
    return Span(begin, begin + draw(st.integers(1, 70)))


def carry(
    sources: list[RankCache], target: RankCache, tokens: Span, wire: str, rng: random.Random
) -> None:
    """All for one rank of the target: cut as a prompt is computed, scattered in any order."""
    source, head_bytes = sources[0].layout, head_nbytes(target.layout.head_dim, wire)
    coverage = Coverage(target.shard, tokens, head_bytes)
    slab_bytes = rng.randrange(1000, 20_000)
    digest = rng.choice(target.memory.digests)
    form = Form(wire, digest)
    packed = []
    for rank, cache in enumerate(sources):
        index = 0
        for part in parts(source, rank, target.layout, target.memory.rank):
            cutter = Cutter(part, tokens, head_bytes, slab_bytes, num_cut=index)
            moves = []
            for tokens_end in sorted({rng.randrange(*tokens) + 1, tokens.end}):
                for layers_end in sorted({rng.randrange(source.num_layers + 1), source.num_layers}):
                    moves += cutter.advance(layers_end, tokens_end)
            assert cutter.complete
            index = cutter.num_cut
            for move in moves:
                slab = memoryview(bytearray(move.nbytes))
                packed.append((rank, move, slab, cache.memory.pack(cache.blocks, move, form, slab)))
    rng.shuffle(packed)
    for rank, move, slab, digests in packed:
        assert coverage.fault(move) is None
        if rng.random() < 0.2:
            place, bit = rng.randrange(move.nbytes), 1 << rng.randrange(8)
            slab[place] ^= bit
            assert target.memory.scatter(target.blocks, move, form, slab) != digests
            slab[place] ^= bit
        assert target.memory.scatter(target.blocks, move, form, slab) == digests
        coverage.add(rank, move)
    assert coverage.complete


@settings(max_examples=60)
@given(pair=layouts(FLOATS, FLOATS), tokens=ranges(), seed=st.integers(0, 2**32))
def test_any_split_to_any_split(pair: Any, tokens: Span, seed: int) -> None:
    source, target = pair
    rng, kv = random.Random(seed), random_kv(source, tokens.end, seed)
    wire = wire_dtype(source, target)
    sources = [RankCache(source, rank, tokens.end, rank) for rank in range(source.num_ranks)]
    for cache in sources:
        cache.write(kv, None)
    expected = kv[:, :, slice(*tokens)].to(getattr(torch, wire)).to(getattr(torch, target.dtype))
    for rank in range(target.num_ranks):
        cache = RankCache(target, rank, tokens.end, 100 + rank)
        before = cache.outside(tokens).clone()
        carry(sources, cache, tokens, wire, rng)
        assert bits(cache.read(tokens)).equal(bits(cache.of(expected)))
        assert bits(cache.outside(tokens)).equal(bits(before))


@settings(max_examples=20)
@given(
    pair=st.sampled_from(sorted(QUANTISED_BYTES)).flatmap(lambda kind: layouts([kind], [kind])),
    tokens=ranges(),
    seed=st.integers(0, 2**32),
)
def test_quantised_caches_keep_their_bits_and_scales(pair: Any, tokens: Span, seed: int) -> None:
    source, target = pair
    rng = random.Random(seed)
    shape = (source.num_layers, 2, tokens.end, source.num_kv_heads, source.head_dim)
    random_bits = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    kv = torch.from_numpy(random_bits).view(getattr(torch, source.dtype))
    scales = torch.rand(shape[:-1], generator=torch.Generator().manual_seed(seed))
    sources = [RankCache(source, rank, tokens.end, rank) for rank in range(source.num_ranks)]
    for cache in sources:
        cache.write(kv, scales)
    for rank in range(target.num_ranks):
        cache = RankCache(target, rank, tokens.end, 100 + rank)
        carry(sources, cache, tokens, source.dtype, rng)
        assert bits(cache.read(tokens)).equal(bits(cache.of(kv[:, :, slice(*tokens)])))
        got, wanted = cache.read_scales(tokens), cache.of(scales[:, :, slice(*tokens)])
        assert got is not None
        assert got.equal(wanted)


@settings(max_examples=20)
@given(
    pair=layouts(["float32", "bfloat16"], ["float32", "bfloat16"]),
    wire=st.sampled_from(sorted(QUANTISED_BYTES)),
    tokens=ranges(),
    seed=st.integers(0, 2**32),
)
def test_a_lossy_wire_loses_no_more_than_its_steps(
    pair: Any, wire: str, tokens: Span, seed: int
) -> None:
    """Half a step of the scale that the largest element of a token's head asks for: 1/127 of it in
    int8; in FP8 1/16 of each element, or 1/448 / 512 of the largest.
    """
    source, target = pair
    rng, kv = random.Random(seed), random_kv(source, tokens.end, seed)
    sources = [RankCache(source, rank, tokens.end, rank) for rank in range(source.num_ranks)]
    for cache in sources:
        cache.write(kv, None)
    for rank in range(target.num_ranks):
        cache = RankCache(target, rank, tokens.end, 100 + rank)
        carry(sources, cache, tokens, wire, rng)
        expected = cache.of(kv[:, :, slice(*tokens)]).double()
        largest = expected.abs().amax(dim=-1, keepdim=True)
        step = largest / 127 if wire == "int8" else expected.abs() / 8 + largest / 448 / 512
        rounding = expected.abs() * (2.0**-7 if "bfloat16" in (source.dtype, target.dtype) else 0.0)
        error = (cache.read(tokens).double() - expected).abs()
        assert (error <= 0.5001 * step + rounding).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source_tp", "target_tp", "stages"), [(1, 2, (1, 1)), (4, 3, (1, 2)), (3, 1, (2, 1))]
)
def test_ranks_send_to_ranks(source_tp: int, target_tp: int, stages: tuple[int, int]) -> None:
    """Real senders and receivers: every rank of one side has a link to those that it owes."""
    shape = {"num_layers": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    source = KvLayout(**shape, block_size=16, tp=source_tp, pp=stages[0])
    target = KvLayout(**shape, block_size=32, tp=target_tp, pp=stages[1])
    tokens, kv = Span(7, 90), random_kv(source, 90, 1)
    options = LinkOptions(
        secret=b"s", incarnation=Incarnation(7), slab_bytes=4096, staging_bytes=1 << 20
    )
    key, sent, received = AttemptKey(Incarnation(9), RequestId(1), 1), queue.Queue(), queue.Queue()
    sources = [RankCache(source, rank, 90, rank) for rank in range(source.num_ranks)]
    targets = [RankCache(target, rank, 90, 50 + rank) for rank in range(target.num_ranks)]
    receivers = [
        KvReceiver(cache.memory, options, received.put, [listen("loopback")]) for cache in targets
    ]
    senders = [KvSender(cache.memory, options, sent.put) for cache in sources]
    try:
        for cache, receiver in zip(targets, receivers, strict=True):
            receiver.expect(
                ReceiveJob(
                    key=key,
                    lease=LeaseId(1),
                    wire="float32",
                    tokens=tokens,
                    blocks=cache.blocks,
                    deadline_s=time.monotonic() + 60,
                )
            )
        for cache, sender in zip(sources, senders, strict=True):
            cache.write(kv, None)
            for rank, receiver in enumerate(receivers):
                sender.begin(
                    SendJob(
                        key=key,
                        peer=options.incarnation,
                        endpoints=receiver.endpoints,
                        lease=LeaseId(1),
                        target=target,
                        target_rank=rank,
                        wire="float32",
                        tokens=tokens,
                        blocks=cache.blocks,
                    )
                )
            sender.computed(key, source.num_layers, tokens.end)
        events = [sent.get(timeout=20) for _ in range(len(senders) * len(receivers))]
        assert all(isinstance(event, SendDone) for event in events)
        assert all(isinstance(received.get(timeout=20), ReceiveDone) for _ in receivers)
        nbytes = sum(event.account.nbytes for event in events)
        assert nbytes == sum(
            tokens.length * cache.shard.token_bytes(source.head_bytes) for cache in targets
        )
        for cache in targets:
            assert cache.read(tokens).equal(cache.of(kv[:, :, slice(*tokens)]))
    finally:
        for side in (*senders, *receivers):
            side.close()
