"""A scatter follows the gather that fills its slab, tile by tile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from host_moves import make_move
from paged_caches import copied, poison, same_bytes

from kvferry.kernels.kv_pack.host import can_follow, follow, gather
from kvferry.kernels.kv_pack.host_cache import HostCache, HostMove
from kvferry.kernels.kv_pack.host_compiled import CompiledPack
from kvferry.kernels.kv_pack.progress import MOST_SEALED, WORD_BYTES, Progress, Stream

PATIENT_S, HASTY_S = 20.0, 0.01
NUM_TOKENS = 2048
SHAPE = (2, 2, NUM_TOKENS, 2, 64)


@pytest.fixture(params=["compiled", "numpy"])
def pack(request: pytest.FixtureRequest) -> CompiledPack | None:
    return request.getfixturevalue("compiled") if request.param == "compiled" else None


@pytest.fixture
def word() -> memoryview:
    return memoryview(bytearray(WORD_BYTES))[:8]


class Side:
    """A cache, and a move of all of it that has several tiles."""

    def __init__(self, seed: int) -> None:
        self.kv = poison(SHAPE, torch.float32, seed)
        self.cache = HostCache(self.kv, 16)
        self.move: HostMove = make_move(
            blocks=np.random.default_rng(seed).permutation(NUM_TOKENS // 16).astype(np.int32),
            tokens=(5, NUM_TOKENS - 3),
            layers=(0, 2),
            heads=(0, 2),
        )


def slab_for(side: Side) -> memoryview:
    return memoryview(bytearray(side.cache.shape(side.move).nbytes))


def test_what_follows_writes_what_is_gathered(pack: CompiledPack | None, word: memoryview) -> None:
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(
            follow, target.cache, target.move, slab, pack, Progress(word, 7, PATIENT_S)
        )
        packed = gather(source.cache, source.move, slab, pack, Progress(word, 7))
        assert following.result() == packed
    assert len(packed) > 4
    again = slab_for(target)
    assert gather(target.cache, target.move, again, pack) == packed
    assert again == slab


def test_each_tile_is_taken_as_soon_as_it_is_filled(
    pack: CompiledPack | None, word: memoryview
) -> None:
    """Whoever fills the slab stops after three tiles: those are there, no other is touched."""
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    packed = gather(source.cache, source.move, slab, pack)
    before = copied(target.kv)
    np.frombuffer(word, np.uint64)[0] = 7 << 20 | 3
    assert follow(target.cache, target.move, slab, pack, Progress(word, 7, HASTY_S)) is None
    assert not same_bytes(before, target.kv)
    taken = slab_for(target)
    digests = gather(target.cache, target.move, taken, pack)
    assert digests[:3] == packed[:3]
    assert not any(ours == theirs for ours, theirs in zip(digests[3:], packed[3:], strict=True))


@pytest.mark.parametrize("left", [0, 6 << 20 | 99, 8 << 20 | 99, 2**64 - 1])
def test_what_another_use_left_counts_for_nothing(
    pack: CompiledPack | None, word: memoryview, left: int
) -> None:
    target = Side(2)
    before = copied(target.kv)
    np.frombuffer(word, np.uint64)[0] = left
    progress = Progress(word, 7, HASTY_S)
    assert follow(target.cache, target.move, slab_for(target), pack, progress) is None
    assert same_bytes(before, target.kv)


def test_a_slow_gather_is_waited_for(pack: CompiledPack | None, word: memoryview) -> None:
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    packed = gather(source.cache, source.move, slab, pack)
    tiles = np.frombuffer(word, np.uint64)

    def tell() -> None:
        for number in range(1, len(packed) + 1):
            threading.Event().wait(0.002)
            tiles[0] = 7 << 20 | number

    with ThreadPoolExecutor(1) as pool:
        telling = pool.submit(tell)
        progress = Progress(word, 7, PATIENT_S)
        assert follow(target.cache, target.move, slab, pack, progress) == packed
        telling.result()


def test_numpy_follows_the_compiled_pack_and_that_follows_numpy(
    compiled: CompiledPack, word: memoryview
) -> None:
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    for grant, ahead, behind in ((7, compiled, None), (8, None, compiled)):
        packed = gather(source.cache, source.move, slab, ahead, Progress(word, grant))
        progress = Progress(word, grant, PATIENT_S)
        assert follow(target.cache, target.move, slab, behind, progress) == packed


def test_one_tile_is_not_followed() -> None:
    side = Side(1)
    assert can_follow(side.cache, side.move)
    assert not can_follow(side.cache, make_move(blocks=side.move.blocks))


@pytest.fixture
def words() -> memoryview:
    """With room for digests."""
    return memoryview(bytearray(WORD_BYTES))


def test_what_follows_waits_for_the_seal(pack: CompiledPack | None, words: memoryview) -> None:
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    behind, ahead = Progress(words, 7, PATIENT_S, has_seal=True), Progress(words, 7)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow, target.cache, target.move, slab, pack, behind)
        packed = gather(source.cache, source.move, slab, pack, ahead)
        assert not behind.is_sealed_with(packed)
        threading.Event().wait(0.01)
        assert not following.done()
        ahead.seal(packed)
        assert following.result() == packed
    assert behind.is_sealed_with(packed)


def test_what_is_never_sealed_is_written_all_the_same(
    pack: CompiledPack | None, words: memoryview
) -> None:
    source, target = Side(1), Side(2)
    slab = slab_for(source)
    packed = gather(source.cache, source.move, slab, pack, Progress(words, 7))
    progress = Progress(words, 7, HASTY_S, has_seal=True)
    assert follow(target.cache, target.move, slab, pack, progress) == packed
    assert not progress.is_sealed_with(packed)


@pytest.mark.parametrize("others", [[1, 2, 4], [1, 2], [1, 2, 3, 4], [], [2, 1, 3]], ids=str)
def test_a_seal_is_of_its_digests_alone(words: memoryview, others: list[int]) -> None:
    progress = Progress(words, 7)
    progress.seal([1, 2, 3])
    assert progress.is_sealed_with([1, 2, 3])
    assert not progress.is_sealed_with(others)


@pytest.mark.parametrize("grant", [6, 8, 7 << 20])
def test_a_seal_is_of_its_use_of_the_slab_alone(words: memoryview, grant: int) -> None:
    Progress(words, 7).seal([2**64 - 1])
    assert not Progress(words, grant).is_sealed_with([2**64 - 1])
    assert Progress(words, 7).is_sealed_with([2**64 - 1])


def test_only_what_has_room_is_sealed(word: memoryview, words: memoryview) -> None:
    assert Progress(words, 7).can_seal(MOST_SEALED)
    assert not Progress(words, 7).can_seal(MOST_SEALED + 1)
    assert not Progress(word, 7).can_seal(1)
    assert not Progress(Stream(-1), 7).can_seal(1)
    assert not Progress(Stream(-1), 7).is_filled(0)
    Progress(words, 7).tell_filled(MOST_SEALED + 2)
    assert not Progress(words, 7).is_sealed_with([0] * (MOST_SEALED + 1))
