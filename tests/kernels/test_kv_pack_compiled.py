"""The compiled gather and scatter do what the numpy ones do, bit for bit, on every kind of CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled_packs import COMPILER
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_caches import copied, picked, poison, put, same_bytes, slab_bytes_of, slots_of
from sourcetree import ROOT

from kvferry.kernels.kv_layer import QUANTISED_TYPES
from kvferry.kernels.kv_pack.host import gather, scatter
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_compiled import NAME, CompiledPack, compiled_pack

torch.set_num_threads(1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, *QUANTISED_TYPES]))
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    head_dim = draw(st.sampled_from([4, 16, 20, 64, 80, 128]))
    block_size, num_blocks = draw(st.sampled_from([1, 3, 8, 16, 32])), draw(st.integers(1, 40))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    ends = sorted(rng.choice(num_blocks * block_size + 1, 2, replace=False).tolist())
    layer, head = draw(st.integers(0, layers - 1)), draw(st.integers(0, heads - 1))
    move = HostMove(
        blocks=rng.permutation(num_blocks).astype(np.int32),
        tokens=(ends[0], ends[1]),
        layers=(layer, draw(st.integers(layer + 1, layers))),
        heads=(head, draw(st.integers(head + 1, heads))),
        wire=dtype,
        digest="xxh3",
        slab_index=draw(st.integers(0, 2**20)),
    )
    shape = (layers, 2, num_blocks * block_size, heads, head_dim)
    return shape, dtype, block_size, move, seed


@settings(max_examples=80)
@given(cases())
def test_it_equals_numpy(pack: CompiledPack, case: tuple[Any, ...]) -> None:
    shape, dtype, block_size, move, seed = case
    source = poison(shape, dtype, seed)
    cache = HostCache(source, block_size)
    slab, expected = (memoryview(bytearray(cache.shape(move).nbytes)) for _ in range(2))
    packed = gather(cache, move, slab, pack)
    assert packed == gather(cache, move, expected)
    assert slab == expected

    target = poison(shape, dtype, seed + 7)
    reference = copied(target)
    assert scatter(HostCache(target, block_size), move, slab, pack) == packed
    slots = slots_of(move.blocks, *move.tokens, block_size)
    part = picked(source, slots, move.layers, move.heads)
    assert bytes(slab) == slab_bytes_of(part)
    put(reference, slots, move.layers, move.heads, part)
    assert same_bytes(target, reference)


def long_move(**changes: Any) -> HostMove:
    fields: dict[str, Any] = {
        "blocks": np.random.default_rng(1).permutation(256).astype(np.int32),
        "tokens": (5, 4093),
        "layers": (0, 2),
        "heads": (0, 3),
        "wire": torch.float32,
        "digest": "xxh3",
        "slab_index": 3,
    }
    return HostMove(**(fields | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("heads", [(0, 3), (1, 2)])
def test_it_equals_numpy_over_many_tiles(pack: CompiledPack, dtype, heads) -> None:
    cache = HostCache(poison((2, 2, 4096, 3, 64), dtype, 1), 16)
    move = long_move(wire=dtype, heads=heads)
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    packed = gather(cache, move, slab, pack)
    assert packed == gather(cache, move, slab)
    assert len(packed) >= 2
    assert scatter(cache, move, slab, pack) == packed


def test_it_leaves_float64_other_digests_and_short_tiles_to_numpy(pack: CompiledPack) -> None:
    cache = HostCache(poison((2, 2, 4096, 3, 64), torch.float32, 1), 16)
    for move, done in (
        (long_move(), True),
        (long_move(wire=torch.bfloat16), True),
        (long_move(wire=torch.float64), False),
        (long_move(digest="multiply_sum"), False),
    ):
        assert pack.does(cache, move, cache.shape(move)) is done
    small = HostCache(poison((1, 2, 64, 1, 4), torch.float32, 1), 16)
    for tokens, done in ((8, True), (7, False), (1, False)):
        move = long_move(layers=(0, 1), heads=(0, 1), tokens=(0, tokens), blocks=np.arange(4))
        assert pack.does(small, move, small.shape(move)) is done


def test_a_block_outside_the_cache_is_refused_before_anything_is_written(
    pack: CompiledPack,
) -> None:
    kv = poison((2, 2, 4096, 3, 64), torch.float32, 1)
    cache, untouched = HostCache(kv, 16), copied(kv)
    for wrong in (-1, 256):
        move = long_move(blocks=np.array([0] * 255 + [wrong], np.int32))
        slab = memoryview(bytearray(cache.shape(move).nbytes))
        for function in (gather, scatter):
            with pytest.raises(IndexError, match="outside the cache of 256"):
                function(cache, move, slab, pack)
    assert same_bytes(kv, untouched)


@pytest.mark.parametrize("head_dim", [64, 4])
def test_digests_are_those_of_what_was_written_whatever_a_peer_does_meanwhile(
    pack: CompiledPack, scribbled: Any, head_dim: int
) -> None:
    """Whole stripes of 64 bytes, and stripes that are put together from several tokens."""
    cache = HostCache(poison((2, 2, 4096, 3, head_dim), torch.float32, 1), 16)
    move = long_move(heads=(0, 3) if head_dim == 64 else (1, 2))
    slab = memoryview(bytearray(cache.shape(move).nbytes))
    gather(cache, move, slab)
    with scribbled(slab):
        for _ in range(20):
            found = scatter(cache, move, slab, pack)
            private = memoryview(bytearray(len(slab)))
            assert gather(cache, move, private) == found


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_library_of_another_version_is_not_used(tmp_path: Path) -> None:
    other = tmp_path / "other.c"
    other.write_text("int kvferry_abi(void) { return 0; }\n")
    path = tmp_path / "other.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", path, other], check=True)
    with pytest.raises(OSError, match="another version"):
        CompiledPack(path)


def test_an_installation_uses_the_library_that_it_was_built_with() -> None:
    folder = ROOT / "kernels" / "kv_pack"
    built = [path.name for path in folder.glob(f"{NAME}.*so")]
    assert (compiled_pack() is not None) == bool(built)
