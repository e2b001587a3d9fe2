"""KV caches on a device: the same bytes and digests as in host memory, in the order of events.

The kernels run in Triton's interpreter; streams are fakes that run late.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice, FakeEvent, FakeStream
from numpy.typing import NDArray

from kvferry.core.span import Span
from kvferry.kv_transfer.device_memory import DIGEST, DeviceKvMemory
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import QUANTISED_BYTES, KvLayout, head_nbytes
from kvferry.kv_transfer.memory import Form, PagedKvMemory
from kvferry.kv_transfer.plan import SlabMove, slab_nbytes

NUM_BLOCKS, HEAD_DIM = 9, 16
LAYERS, HEADS, TOKENS = Span(1, 3), Span(1, 4), Span(5, 50)
TYPES = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "bfloat16"),
    ("bfloat16", "int8"),
    ("float32", "float8_e4m3fn"),
    ("int8", "int8"),
]


def make_layout(dtype: str, block_size: int = 8, tp: int = 1) -> KvLayout:
    return KvLayout(
        num_layers=3,
        num_kv_heads=4,
        head_dim=HEAD_DIM,
        block_size=block_size,
        dtype=dtype,
        tp=tp,
    )


class Cache:
    """One rank's shard with random, or other, KV in it and blocks in random order."""

    def __init__(self, layout: KvLayout, *, rank: int = 0, fill: bool = True) -> None:
        shard = layout.shard(rank)
        num_slots = NUM_BLOCKS * layout.block_size
        shape = (shard.layers.length, 2, num_slots, shard.heads.length, HEAD_DIM)
        values = torch.randn(shape) if fill else torch.zeros(shape)
        self.layout, self.rank = layout, rank
        self.scales = None
        if layout.dtype in QUANTISED_BYTES:
            values *= 50
            self.scales = torch.rand(shape[:-1]) if fill else torch.zeros(shape[:-1])
        self.slots = values.to(getattr(torch, layout.dtype))
        self.generations = np.arange(1, NUM_BLOCKS + 1, dtype=np.uint32)
        block_ids = np.random.permutation(NUM_BLOCKS).astype(np.int32)
        self.blocks = BlockTable(block_ids=block_ids, generations=self.generations[block_ids])

    def on_host(self) -> PagedKvMemory:
        return PagedKvMemory(
            self.slots, self.layout, self.generations, rank=self.rank, scales=self.scales
        )

    def on_device(self, device: FakeDevice, **changes: Any) -> DeviceKvMemory:
        return DeviceKvMemory(
            self.slots,
            self.layout,
            self.generations,
            rank=self.rank,
            scales=self.scales,
            runtime=device,
            **changes,
        )

    def bytes(self) -> NDArray[np.uint8]:
        """All that is in the cache."""
        tensors = [self.slots, *([] if self.scales is None else [self.scales])]
        return np.concatenate([x.view(torch.uint8).numpy().reshape(-1) for x in tensors])


def make_move(
    wire: str,
    *,
    layers: Span = LAYERS,
    heads: Span = HEADS,
    tokens: Span = TOKENS,
) -> SlabMove:
    nbytes = slab_nbytes(head_nbytes(HEAD_DIM, wire), layers, heads, tokens)
    return SlabMove(7, layers, heads, tokens, nbytes)


def make_slab(nbytes: int, on_device: bool) -> Any:
    slab = torch.full((nbytes,), 0xEE, dtype=torch.uint8)
    return slab if on_device else memoryview(slab.numpy())


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(random.Random(random.random()))


@pytest.mark.parametrize("on_device", [True, False], ids=["device slab", "host slab"])
@pytest.mark.parametrize(("dtype", "wire"), TYPES)
def test_a_pack_is_the_hosts(device: FakeDevice, dtype: str, wire: str, on_device: bool) -> None:
    cache, move, form = Cache(make_layout(dtype)), make_move(wire), Form(wire, DIGEST)
    expected, slab = make_slab(move.nbytes, False), make_slab(move.nbytes, on_device)
    digests = cache.on_host().pack(cache.blocks, move, form, expected)
    assert cache.on_device(device).pack(cache.blocks, move, form, slab) == digests
    assert bytes(slab.numpy() if on_device else slab) == bytes(expected)


@pytest.mark.parametrize("on_device", [True, False], ids=["device slab", "host slab"])
@pytest.mark.parametrize(
    ("dtype", "wire"), [(b, a) for a, b in TYPES if a == "float32"] + TYPES[:2]
)
def test_a_scatter_is_the_hosts(device: FakeDevice, dtype: str, wire: str, on_device: bool) -> None:
    source, move, form = Cache(make_layout("float32", 16)), make_move(wire), Form(wire, DIGEST)
    slab = make_slab(move.nbytes, False)
    packed = source.on_host().pack(source.blocks, move, form, slab)
    np.random.seed(3)
    expected = Cache(make_layout(dtype), fill=False)
    np.random.seed(3)
    target = Cache(make_layout(dtype), fill=False)
    assert expected.on_host().scatter(expected.blocks, move, form, slab) == packed
    given = torch.frombuffer(slab, dtype=torch.uint8) if on_device else slab
    assert target.on_device(device).scatter(target.blocks, move, form, given) == packed
    np.testing.assert_array_equal(target.bytes(), expected.bytes())


def test_one_rank_of_two_moves_its_own_heads(device: FakeDevice) -> None:
    cache = Cache(make_layout("float32", tp=2), rank=1)
    move, form = make_move("float32", heads=Span(2, 4)), Form("float32", DIGEST)
    expected, slab = make_slab(move.nbytes, False), make_slab(move.nbytes, True)
    digests = cache.on_host().pack(cache.blocks, move, form, expected)
    assert cache.on_device(device).pack(cache.blocks, move, form, slab) == digests
    assert bytes(slab.numpy()) == bytes(expected)


def test_a_pack_waits_for_the_layers_and_for_nothing_else(device: FakeDevice) -> None:
    """The compute stream is late, and goes on for ever after: a pack needs its event alone."""
    cache, move, form = Cache(make_layout("float32")), make_move("float32"), Form("float32", DIGEST)
    values = torch.randn(cache.slots.shape)
    compute = device.stream()
    compute.enqueue(lambda: cache.slots.copy_(values))
    computed = compute.record()
    compute.wait_for(FakeEvent(device))
    compute.enqueue(lambda: pytest.fail("the compute stream was waited for"))
    slab = make_slab(move.nbytes, True)
    digests = cache.on_device(device).pack(cache.blocks, move, form, slab, computed)
    expected = make_slab(move.nbytes, False)
    assert cache.on_host().pack(cache.blocks, move, form, expected) == digests
    assert bytes(slab.numpy()) == bytes(expected)
    assert torch.equal(cache.slots, values)


def test_the_fake_device_shows_what_an_event_is_for(device: FakeDevice) -> None:
    cache, move, form = Cache(make_layout("float32")), make_move("float32"), Form("float32", DIGEST)
    before = cache.slots.clone()
    compute = device.stream()
    compute.enqueue(lambda: cache.slots.zero_())
    compute.record()
    cache.on_device(device).pack(cache.blocks, move, form, make_slab(move.nbytes, True))
    assert torch.equal(cache.slots, before)


def test_the_compute_stream_reads_after_the_scatters_event(device: FakeDevice) -> None:
    source, move, form = (
        Cache(make_layout("float32")),
        make_move("float32"),
        Form("float32", DIGEST),
    )
    slab = make_slab(move.nbytes, True)
    source.on_device(device).pack(source.blocks, move, form, slab)
    target = Cache(make_layout("float32"), fill=False)
    computes: list[FakeStream] = []
    read: list[torch.Tensor] = []

    def step(event: FakeEvent) -> None:
        for compute in computes:
            compute.wait_for(event)
            compute.enqueue(lambda: read.append(target.slots.clone()))

    memory = target.on_device(device, on_scatter=step)
    memory.scatter(target.blocks, move, form, torch.zeros_like(slab))
    # The newest stream of the device runs as soon as its event lets it.
    computes.append(device.stream())
    memory.scatter(target.blocks, move, form, slab)
    computes[0].record().synchronize()
    assert torch.equal(read[0], target.slots)
    assert target.slots.any()


def test_moves_of_one_lane_do_not_touch_one_anothers_memory(device: FakeDevice) -> None:
    """Large after small, after large; the staging of each is that of the one before."""
    cache = Cache(make_layout("float32"))
    memory, host = cache.on_device(device), cache.on_host()
    for tokens in (Span(0, 9), Span(3, 70), Span(60, 65), Span(0, 72)):
        move, form = make_move("float32", tokens=tokens), Form("float32", DIGEST)
        expected, slab = make_slab(move.nbytes, False), make_slab(move.nbytes, False)
        digests = host.pack(cache.blocks, move, form, expected)
        assert memory.pack(cache.blocks, move, form, slab) == digests
        assert bytes(slab) == bytes(expected)
    assert len(device.streams) == 1


def test_threads_have_lanes_of_their_own(device: FakeDevice) -> None:
    device.latest_first = False
    cache = Cache(make_layout("float32"))
    memory, host, form = cache.on_device(device), cache.on_host(), Form("float32", DIGEST)
    moves = [make_move("float32", tokens=Span(n, 30 + 5 * n)) for n in range(3)]
    slabs = [make_slab(move.nbytes, False) for move in moves]
    got: dict[int, list[int]] = {}
    together = threading.Barrier(len(moves), timeout=60.0)

    def run(number: int) -> None:
        for _ in range(2):
            together.wait()
            got[number] = memory.pack(cache.blocks, moves[number], form, slabs[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(moves))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, move in enumerate(moves):
        expected = make_slab(move.nbytes, False)
        assert host.pack(cache.blocks, move, form, expected) == got[number]
        assert bytes(slabs[number]) == bytes(expected)


def test_a_block_that_was_given_away_is_neither_read_nor_written(device: FakeDevice) -> None:
    cache, move, form = Cache(make_layout("float32")), make_move("float32"), Form("float32", DIGEST)
    memory = cache.on_device(device)
    assert memory.is_fresh(cache.blocks, move)
    slab = make_slab(move.nbytes, True)
    memory.pack(cache.blocks, move, form, slab)
    victim = int(cache.blocks.block_ids[2])
    cache.generations[victim] += 1
    assert not memory.is_fresh(cache.blocks, move)
    before = cache.slots.clone()
    memory.scatter(cache.blocks, move, form, torch.full_like(slab, 0x11))
    stale = slice(8 * victim, 8 * victim + 8)
    assert torch.equal(cache.slots[:, :, stale], before[:, :, stale])
    assert not torch.equal(cache.slots, before)
    memory.pack(cache.blocks, move, form, slab)
    packed = slab.view(torch.float32).view(2, 2, 45, 3, HEAD_DIM)
    assert not packed[:, :, 11:19].any()
    assert packed[:, :, :11].all()


def test_a_block_outside_the_cache_is_an_error(device: FakeDevice) -> None:
    cache, move, form = Cache(make_layout("float32")), make_move("float32"), Form("float32", DIGEST)
    cache.blocks.block_ids[3] = NUM_BLOCKS
    with pytest.raises(IndexError):
        cache.on_device(device).pack(cache.blocks, move, form, make_slab(move.nbytes, True))


def test_what_does_not_fit_is_refused(device: FakeDevice) -> None:
    cache, move = Cache(make_layout("float32")), make_move("float32", tokens=Span(60, 90))
    memory = cache.on_device(device)
    slab = make_slab(move.nbytes, True)
    with pytest.raises(ValueError, match="tokens"):
        memory.pack(cache.blocks, move, Form("float32", DIGEST), slab)
    with pytest.raises(ValueError, match="digest: xxh3"):
        memory.pack(cache.blocks, make_move("float32"), Form("float32", "xxh3"), slab)
    with pytest.raises(ValueError, match="the layout says"):
        DeviceKvMemory(cache.slots, make_layout("bfloat16"), cache.generations, runtime=device)


def test_several_packs_may_be_under_way(device: FakeDevice) -> None:
    cache, form = Cache(make_layout("float32")), Form("float32", DIGEST)
    memory, host = cache.on_device(device), cache.on_host()
    moves = [make_move("float32", tokens=Span(n, 40 + n)) for n in range(3)]
    slabs = [make_slab(move.nbytes, False) for move in moves]
    under_way = [
        memory.begin_pack(cache.blocks, move, form, slab)
        for move, slab in zip(moves, slabs, strict=True)
    ]
    assert len(device.streams) == 3
    for move, slab, moving in reversed(list(zip(moves, slabs, under_way, strict=True))):
        expected = make_slab(move.nbytes, False)
        assert moving.finish() == host.pack(cache.blocks, move, form, expected)
        assert bytes(slab) == bytes(expected)
    memory.pack(cache.blocks, moves[0], form, slabs[0])
    assert len(device.streams) == 3
