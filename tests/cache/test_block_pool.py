"""States, references, fences and eviction of the block pool."""

from __future__ import annotations

import pytest

from kvferry.cache.block_pool import BlockCounts, BlockPool, BlockState, BlockStateError
from kvferry.cache.hashing import chain_hashes, root_hash
from kvferry.cache.prefix_index import CacheEvents
from kvferry.core.ids import BlockHash, BlockId

ROOT = root_hash(1, b"", "", "float32", "float32")


def chain(first: int, length: int) -> list[BlockHash]:
    """Hashes of a chain of one-token blocks: chains with equal ``first`` share their prefix."""
    return chain_hashes(ROOT, [first, *range(length - 1)], 1)


def fill(pool: BlockPool, hashes: list[BlockHash], start: int = 0) -> list[BlockId]:
    """Allocate blocks and publish them as blocks ``start`` and on of a chain."""
    blocks = pool.allocate(len(hashes) - start)
    assert blocks is not None
    for i, block in enumerate(blocks, start):
        pool.publish(block, hashes[i], ([ROOT, *hashes])[i])
    return blocks


def test_a_block_goes_through_its_states() -> None:
    pool = BlockPool(4)
    reserved = pool.reserve(3)
    assert reserved is not None
    assert pool.counts() == BlockCounts(free=1, reserved=3, in_use=0, cached=0, fenced=0)
    pool.commit(reserved[:2])
    pool.release(reserved[2:])
    hashes = chain(0, 2)
    pool.publish(reserved[0], hashes[0], ROOT)
    assert pool.match(hashes) == reserved[:1]
    assert pool.state(reserved[0]) is BlockState.IN_USE
    pool.release(reserved[:2])
    assert pool.counts() == BlockCounts(free=3, reserved=0, in_use=0, cached=1, fenced=0)
    pool.acquire(pool.match(hashes))
    assert pool.counts() == BlockCounts(free=3, reserved=0, in_use=1, cached=0, fenced=0)
    assert pool.counts().total == pool.num_blocks


def test_reserve_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.release(fill(pool, chain(0, 2)))
    assert pool.num_free == 4
    before = pool.counts()
    assert pool.reserve(5) is None
    assert pool.counts() == before
    assert pool.reserve(0) == []
    blocks = pool.reserve(4)
    assert blocks is not None
    assert sorted(blocks) == [0, 1, 2, 3]
    assert pool.reserve(1) is None


def test_the_generation_rises_at_every_allocation() -> None:
    pool = BlockPool(1)
    for expected in range(1, 5):
        assert pool.allocate(1) == [0]
        assert pool.generations.tolist() == [expected]
        pool.release([BlockId(0)])
    pool.generations[0] = 2**32 - 1
    assert pool.allocate(1) == [0]
    assert pool.generations.tolist() == [0]


def test_references_are_counted() -> None:
    pool = BlockPool(2)
    hashes = chain(0, 1)
    blocks = fill(pool, hashes)
    pool.acquire(pool.match(hashes))
    assert pool.ref_count(blocks[0]) == 2
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.IN_USE
    pool.release(blocks)
    assert pool.state(blocks[0]) is BlockState.CACHED


def test_acquiring_cached_blocks_takes_them_from_what_is_free() -> None:
    pool = BlockPool(4)
    hashes = chain(0, 2)
    blocks = fill(pool, hashes)
    other = fill(pool, hashes[:1] + chain(5, 2)[1:], start=1)
    pool.release(blocks)
    assert pool.num_free_among(pool.match(hashes)) == 2
    assert pool.num_free_among(other) == 0
    pool.acquire(pool.match(hashes))
    assert pool.num_free == 1


def test_wrong_transitions_raise() -> None:
    pool = BlockPool(3)
    free, reserved, used = BlockId(2), *(pool.reserve(1) or []), *(pool.allocate(1) or [])
    for illegal in (
        lambda: pool.commit([free]),
        lambda: pool.commit([used]),
        lambda: pool.acquire([free]),
        lambda: pool.acquire([reserved]),
        lambda: pool.release([free]),
        lambda: pool.publish(reserved, chain(0, 1)[0], ROOT),
        lambda: pool.publish(free, chain(0, 1)[0], ROOT),
    ):
        with pytest.raises(BlockStateError):
            illegal()
    pool.release([used])
    with pytest.raises(BlockStateError):
        pool.release([used])
    with pytest.raises(BlockStateError):
        BlockPool(0)


def test_a_block_has_one_identity() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    assert pool.publish(block, chain(0, 1)[0], ROOT)
    assert pool.publish(block, chain(0, 1)[0], ROOT)
    with pytest.raises(BlockStateError):
        pool.publish(block, chain(1, 1)[0], ROOT)


def test_without_a_prefix_cache_nothing_is_findable() -> None:
    pool = BlockPool(2, prefix_cache=False)
    hashes = chain(0, 2)
    blocks = fill(pool, hashes)
    assert pool.match(hashes) == []
    pool.release(blocks)
    assert pool.counts().free == 2
    assert pool.drain_events() == CacheEvents([], [])
    assert pool.snapshot() == []


def test_eviction_is_leaf_first_then_longest_unused() -> None:
    pool = BlockPool(6)
    old, new = chain(1, 3), chain(2, 3)
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    lost: list[BlockHash] = []
    pool.drain_events()
    for _ in range(6):
        assert pool.allocate(1) is not None
        lost += pool.drain_events().removed
    assert lost == [*reversed(old), *reversed(new)]


def test_use_refreshes_a_prefix() -> None:
    pool = BlockPool(4)
    old, new = chain(1, 2), chain(2, 2)
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    used = pool.match(old[:1])
    pool.acquire(used)
    pool.release(used)
    pool.drain_events()
    assert pool.allocate(3) is not None
    # The leaf of ``old`` was not used again; its prefix was, and outlives all of ``new``.
    assert pool.drain_events().removed == [old[1], new[1], new[0]]
    assert pool.match(old) == used


def test_a_second_copy_stays_anonymous_and_is_dropped() -> None:
    pool = BlockPool(4)
    hashes = chain(0, 2)
    first = fill(pool, hashes)
    second = fill(pool, hashes)
    assert pool.match(hashes) == first
    assert pool.drain_events() == CacheEvents(hashes, [])
    pool.release(second)
    assert pool.counts().free == 2
    pool.release(first)
    assert pool.counts() == BlockCounts(free=2, reserved=0, in_use=0, cached=2, fenced=0)


def test_a_copy_takes_over_when_the_findable_block_is_evicted() -> None:
    pool = BlockPool(5)
    hashes = chain(0, 3)
    first = fill(pool, hashes[:2])
    second = fill(pool, hashes)
    pool.release(first)
    assert pool.match(hashes) == [*first, second[2]]
    # Both blocks can be reused although a child of theirs is held: the copies stand in.
    assert pool.num_free == 2
    assert pool.allocate(2) is not None
    assert pool.match(hashes) == second
    assert pool.drain_events().removed == []
    pool.release(second)
    assert pool.num_free == 3


def test_dropping_a_copy_refreshes_the_findable_block() -> None:
    pool = BlockPool(6)
    shared, other = chain(1, 2), chain(2, 1)
    first = fill(pool, shared[:1])
    second = fill(pool, shared)
    pool.release(first)
    pool.release(fill(pool, other))
    pool.release(second)
    assert pool.counts() == BlockCounts(free=3, reserved=0, in_use=0, cached=3, fenced=0)
    pool.drain_events()
    assert pool.allocate(6) is not None
    assert pool.drain_events().removed == [*other, shared[1], shared[0]]


def test_a_fence_holds_unpublished_blocks_back() -> None:
    pool = BlockPool(2)
    used = pool.allocate(1) or []
    reserved = pool.reserve(1) or []
    pool.release(used, fence=7)
    pool.release(reserved, fence=7)
    assert pool.counts() == BlockCounts(free=0, reserved=0, in_use=0, cached=0, fenced=2)
    assert pool.reserve(1) is None
    with pytest.raises(BlockStateError):
        pool.release(used)
    pool.lift(6)
    assert pool.counts().fenced == 2
    pool.lift(7)
    assert pool.counts().free == 2
    assert pool.num_fences == 0
    pool.lift(7)


def test_a_fenced_published_block_is_findable_but_not_evicted() -> None:
    pool = BlockPool(2)
    hashes = chain(0, 2)
    blocks = fill(pool, hashes)
    pool.release(blocks, fence="step 3")
    assert pool.counts().cached == 2
    assert pool.num_free == 0
    assert pool.reserve(1) is None
    pool.acquire(pool.match(hashes))
    pool.release(blocks)
    assert pool.num_free == 0
    pool.lift("step 3")
    assert pool.num_free == 2
    assert pool.reserve(2) is not None


def test_a_fence_outlives_another_holder_of_the_block() -> None:
    """The first holder's operation may still read what the second one gives back."""
    pool = BlockPool(1)
    blocks = fill(pool, chain(0, 1))
    pool.acquire(blocks)
    pool.release(blocks, fence=1)
    pool.release(blocks)
    assert pool.num_free == 0
    pool.lift(1)
    assert pool.num_free == 1


def test_several_fences_add_up() -> None:
    pool = BlockPool(1)
    blocks = pool.allocate(1) or []
    pool.acquire(blocks)
    pool.release(blocks, fence=1)
    pool.release(blocks, fence=2)
    pool.lift(1)
    assert pool.counts().fenced == 1
    pool.lift(2)
    assert pool.counts().free == 1


def test_a_fenced_copy_can_take_over() -> None:
    pool = BlockPool(3)
    hashes = chain(0, 2)
    first = fill(pool, hashes[:1])
    second = fill(pool, hashes)
    pool.release(first)
    pool.release(second, fence=1)
    assert pool.num_free == 1
    assert pool.allocate(1) == first
    assert pool.counts() == BlockCounts(free=0, reserved=0, in_use=1, cached=2, fenced=0)
    assert pool.match(hashes) == second
    pool.lift(1)
    assert pool.num_free == 2


def test_events_cancel_out_in_order() -> None:
    pool = BlockPool(1)
    first, second = chain(1, 1), chain(2, 1)
    pool.release(fill(pool, first))
    pool.release(fill(pool, second))
    assert pool.drain_events() == CacheEvents(second, [])
    pool.release(fill(pool, first))
    pool.release(fill(pool, second))
    assert pool.drain_events() == CacheEvents([], [])
    assert pool.snapshot() == second


def test_a_child_held_without_its_parent_is_a_defect() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, chain(0, 2))
    pool.release(blocks[:1])
    with pytest.raises(BlockStateError, match="without its parent"):
        pool.reserve(1)
