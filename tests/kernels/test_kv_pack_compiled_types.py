"""The compiled pack converts element types as torch does, bit for bit, on every kind of CPU; only
which NaN a NaN becomes is left open.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_caches import copied, noise

from kvferry.kernels.kv_layer import QUANTISED_TYPES
from kvferry.kernels.kv_pack.host import gather, scatter
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_compiled import MOST_HEAD_DIM, TYPES, CompiledPack
from kvferry.kernels.kv_pack.slab import KvSlots, SlabShape

torch.set_num_threads(1)

FLOATS = (torch.float16, torch.bfloat16)
PAIRS = list(permutations(TYPES, 2))
INF, NAN = torch.inf, torch.nan
RARE = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-40, 3.4e38, 65519.0, 65520.0])


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Heads of any bit pattern, of ordinary numbers, of tiny ones, and of rare ones among those."""
    if dtype in QUANTISED_TYPES:
        return noise(shape, dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    kind = torch.randint(6, shape[:-1], generator=generator)[..., None]
    x = torch.where(kind == 1, x * 2.0**-130, x)
    x = torch.where(kind == 2, x * 2.0**-13, x)
    rare = RARE[torch.randint(len(RARE), shape, generator=generator)]
    is_rare = torch.rand(shape, generator=generator) < 0.05
    x = torch.where((kind == 3) & is_rare, rare, x)
    x = torch.where(kind == 4, 0.0, x)
    return torch.where(kind == 5, noise(shape, dtype, seed), x.to(dtype))


def cache_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> KvSlots:
    elements = numbers(shape, dtype, seed)
    if dtype not in QUANTISED_TYPES:
        return KvSlots(elements)
    return KvSlots(elements, numbers(shape[:-1], torch.float32, seed + 1))


def same_numbers(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """The same bits, or NaN both."""
    if a is None or b is None:
        return a is b
    same = a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)
    same = same.view(*a.shape, a.itemsize).all(-1)
    return bool((same | (a.float().isnan() & b.float().isnan())).all())


def in_slab(slab: memoryview, shape: SlabShape) -> tuple[torch.Tensor, torch.Tensor | None]:
    flat = torch.frombuffer(slab, dtype=torch.uint8)
    return shape.elements(flat), shape.scales(flat)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    dtype, wire = draw(st.sampled_from(PAIRS))
    layers, heads = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    head_dim = draw(st.sampled_from([4, 20, 64, 80, 128, 1028]))
    block_size, num_blocks = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ends = sorted(rng.choice(num_blocks * block_size + 1, 2, replace=False).tolist())
    layer, head = draw(st.integers(0, layers - 1)), draw(st.integers(0, heads - 1))
    move = HostMove(
        blocks=rng.permutation(num_blocks).astype(np.int32),
        tokens=(ends[0], ends[1]),
        layers=(layer, draw(st.integers(layer + 1, layers))),
        heads=(head, draw(st.integers(head + 1, heads))),
        wire=wire,
        digest="xxh3",
        slab_index=draw(st.integers(0, 2**20)),
    )
    return (layers, 2, num_blocks * block_size, heads, head_dim), dtype, block_size, move, seed


def check(pack: CompiledPack, case: tuple[Any, ...]) -> None:
    """Gather and scatter against numpy and torch; digests are of the slab as it is."""
    shape, dtype, block_size, move, seed = case
    cache = HostCache(cache_of(shape, dtype, seed), block_size)
    slab_shape = cache.shape(move)
    slab, expected = (memoryview(bytearray(slab_shape.nbytes)) for _ in range(2))
    packed = gather(cache, move, slab, pack)
    gather(cache, move, expected)
    for ours, theirs in zip(in_slab(slab, slab_shape), in_slab(expected, slab_shape), strict=True):
        assert same_numbers(ours, theirs)

    elements, scales = in_slab(slab, slab_shape)
    elements.copy_(numbers(elements.shape, move.wire, seed + 2))
    if scales is not None:
        scales.copy_(numbers(scales.shape, torch.float32, seed + 3))
    target = cache_of(shape, dtype, seed + 4)
    reference = copied(target)
    digests = scatter(HostCache(target, block_size), move, slab, pack)
    assert digests == scatter(HostCache(reference, block_size), move, slab)
    assert same_numbers(target.elements, reference.elements)
    assert same_numbers(target.scales, reference.scales)
    assert len(packed) == len(digests)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_it_converts_as_torch_does(pack: CompiledPack, case: tuple[Any, ...]) -> None:
    check(pack, case)


def long_move(wire: torch.dtype, heads: tuple[int, int] = (0, 3)) -> HostMove:
    return HostMove(
        blocks=np.random.default_rng(1).permutation(256).astype(np.int32),
        tokens=(5, 4093),
        layers=(0, 2),
        heads=heads,
        wire=wire,
        digest="xxh3",
        slab_index=3,
    )


@pytest.mark.parametrize(("dtype", "wire"), PAIRS, ids=lambda dtype: str(dtype).split(".")[1])
def test_each_pair_is_converted_over_many_tiles(pack: CompiledPack, dtype, wire) -> None:
    shape, move = (2, 2, 4096, 3, 64), long_move(wire, heads=(1, 3))
    cache = HostCache(cache_of(shape, dtype, 1), 16)
    assert pack.does(cache, move, cache.shape(move))
    check(pack, (shape, dtype, 16, move, 1))


@pytest.mark.parametrize("wire", QUANTISED_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digests_of_a_gather_are_those_of_the_slab(pack: CompiledPack, dtype, wire) -> None:
    cache, move = HostCache(cache_of((2, 2, 4096, 3, 64), dtype, 1), 16), long_move(wire)
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    assert gather(cache, move, slab, pack) == scatter(cache, move, slab)


def test_every_half_and_every_byte_is_converted(pack: CompiledPack) -> None:
    """All there are, to float32 and, with what lies halfway to the next one, back."""
    for dtype, count in (
        (torch.float16, 65536),
        (torch.bfloat16, 65536),
        (torch.float8_e4m3fn, 256),
    ):
        bits = torch.arange(count).to(torch.int16 if count > 256 else torch.uint8)
        exact = bits.view(dtype).float()
        halfway = (exact.double() + exact.roll(1).double()) / 2
        near = torch.cat([halfway.float(), halfway.float() * (1 + 2**-23), exact * (1 - 2**-23)])
        scales = None if dtype in FLOATS else torch.ones(1, 2, count // 64, 1)
        wide = torch.cat([exact, near]).repeat(2).view(1, 2, -1, 1, 64)
        for kv, wire in (
            (KvSlots(bits.view(dtype).repeat(2).view(1, 2, -1, 1, 64), scales), torch.float32),
            (KvSlots(wide.contiguous()), dtype),
        ):
            cache = HostCache(kv, 4)
            move = HostMove(
                blocks=np.arange(cache.num_slots // 4, dtype=np.int32),
                tokens=(0, cache.num_slots),
                layers=(0, 1),
                heads=(0, 1),
                wire=wire,
                digest="xxh3",
                slab_index=0,
            )
            shape = cache.shape(move)
            assert pack.does(cache, move, shape)
            slab, expected = (memoryview(bytearray(shape.nbytes)) for _ in range(2))
            gather(cache, move, slab, pack)
            gather(cache, move, expected)
            assert same_numbers(in_slab(slab, shape)[0], in_slab(expected, shape)[0])


def test_longer_heads_are_left_to_torch(pack: CompiledPack) -> None:
    for head_dim, done in ((MOST_HEAD_DIM, True), (MOST_HEAD_DIM + 4, False)):
        cache = HostCache(cache_of((2, 2, 4096, 3, 4), torch.float32, 1), 16)
        cache.head_dim = head_dim
        move = long_move(torch.int8)
        assert pack.does(cache, move, cache.shape(move)) is done


def test_what_is_written_is_what_was_digested_whatever_a_peer_does_meanwhile(
    pack: CompiledPack, scribbled: Any
) -> None:
    """With scales of 1 the cache holds the numbers of the slab."""
    kv = KvSlots(torch.zeros(2, 2, 4096, 3, 64))
    cache, move = HostCache(kv, 16), long_move(torch.int8)
    shape = cache.shape(move)
    slab, private = (memoryview(bytearray(shape.nbytes)) for _ in range(2))
    for memory in (slab, private):
        scales = in_slab(memory, shape)[1]
        assert scales is not None
        scales.fill_(1.0)
    slots = torch.from_numpy(move.blocks).long().repeat_interleave(16) * 16
    slots = (slots + torch.arange(16).repeat(256))[move.tokens[0] : move.tokens[1]]
    with scribbled(slab[: shape.elements_nbytes]):
        for _ in range(20):
            found = scatter(cache, move, slab, pack)
            written = kv.elements.flatten(0, 1)[:, slots]
            in_slab(private, shape)[0].copy_(written.to(torch.int8))
            assert found == scatter(cache, move, private)
