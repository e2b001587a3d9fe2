"""Which blocks are findable, under which hash, and which of them to give up first.

    hash -> block            what a request's own hashes are walked along
    block -> hash            of blocks whose content is known, copies too
    hash -> copies           of the few that have any
    evictable                cached blocks that nothing holds, longest unused first; only leaves
                             are given up

NOTE on order. Whoever uses a block also uses its parents, and releases them together, deeper blocks
first. So in order of release a child always stands before its parent, and plain LRU is leaf first.
The one exception is a *copy*: two sequences fill the same block; the first is findable, the second
stays anonymous and is remembered here. Freeing a copy therefore refreshes the findable block; and
when the findable one is given up while a copy is still held, the copy takes over its hash. With
this, every evictable block can be given up at some point without touching a block that is held, so
their number is exactly what can be allocated.

A step gives up and adds as many blocks as its sequences fill: whole lists of them are taken in at
once, and nothing is allocated per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Net changes of the set of findable hashes; no hash is in both lists."""

    added: list[BlockHash]
    """Parents before children."""
    removed: list[BlockHash]


class PrefixIndex:
    """The findable blocks of one pool. Blocks of one chain must be added parents first."""

    def __init__(self, num_blocks: int) -> None:
        self._found: dict[BlockHash, BlockId] = {}
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._copies: dict[BlockHash, list[BlockId]] = {}
        """Oldest first; none is empty."""
        # Of findable blocks: the hash before it, if that was findable, and how many come next.
        self._parent_of: list[BlockHash | None] = [None] * num_blocks
        self._num_children = [0] * num_blocks
        # Keeps the order, removes anywhere, and finds the first in constant time; a plain dict
        # would walk over all that left its front before.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest findable prefix of a chain."""
        found: list[BlockId] = []
        for block_hash in hashes:
            block = self._found.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """Hash of the content of a block, be it findable or a copy."""
        return self._hash_of[block]

    def is_findable(self, block: BlockId) -> bool:
        block_hash = self._hash_of[block]
        return block_hash is not None and self._found[block_hash] == block

    def add_all(
        self,
        blocks: Sequence[BlockId],
        hashes: Sequence[BlockHash],
        parents: Sequence[BlockHash],
    ) -> BlockId | None:
        """Make blocks findable, each after its parent. One whose hash is taken becomes an unnamed
        copy; one that is here already stays as it is. Returns a block that is here under another
        hash, before which it stops; None is as it should be.
        """
        found, hash_of, parent_of = self._found, self._hash_of, self._parent_of
        added, removed = self._added, self._removed
        for block, block_hash, parent_hash in zip(blocks, hashes, parents, strict=True):
            known = hash_of[block]
            if known is not None:
                if known != block_hash:
                    return block
                continue
            hash_of[block] = block_hash
            if block_hash in found:
                self._copies.setdefault(block_hash, []).append(block)
                continue
            found[block_hash] = block
            parent = found.get(parent_hash)
            if parent is None:
                parent_of[block] = None
            else:
                parent_of[block] = parent_hash
                self._num_children[parent] += 1
            if block_hash in removed:
                del removed[block_hash]
            else:
                added[block_hash] = None
        return None

    def offer(self, block: BlockId) -> None:
        """A findable block is held by nothing: it may be given up, after those offered before."""
        self._evictable[block] = None

    def withdraw(self, block: BlockId) -> None:
        """A findable block is held again."""
        self._evictable.pop(block, None)

    def is_evictable(self, block: BlockId) -> bool:
        return block in self._evictable

    def forget_copy(self, block: BlockId) -> None:
        """A copy leaves; its content was just used, so the findable block counts as used now."""
        block_hash = self._hash_of[block]
        assert block_hash is not None, "a block of unknown content is no copy"
        self._hash_of[block] = None
        copies = self._copies[block_hash]
        copies.remove(block)
        if not copies:
            del self._copies[block_hash]
        if self._found[block_hash] in self._evictable:
            self._evictable.move_to_end(self._found[block_hash])

    def evict(self, count: int) -> tuple[list[BlockId], list[BlockId]]:
        """Give up the longest unused leaves: (``count`` blocks, the copies that took over a hash
        of theirs).

        Raises LookupError when no block can be given up.
        """
        found, hash_of, copies = self._found, self._hash_of, self._copies
        parent_of, num_children = self._parent_of, self._num_children
        added, removed = self._added, self._removed
        blocks: list[BlockId] = []
        heirs: list[BlockId] = []
        for _ in range(count):
            block = self._next_leaf()
            block_hash = hash_of[block]
            assert block_hash is not None, "only findable blocks are offered"
            hash_of[block] = None
            blocks.append(block)
            if block_hash in copies:
                heirs.append(self._hand_over(block, block_hash))
                continue
            del found[block_hash]
            parent_hash = parent_of[block]
            if parent_hash is not None:
                num_children[found[parent_hash]] -= 1
            if block_hash in added:
                del added[block_hash]
            else:
                removed[block_hash] = None
        return blocks, heirs

    def _next_leaf(self) -> BlockId:
        """Takes it out of ``evictable``."""
        for block in self._evictable:
            if not self._num_children[block] or self._hash_of[block] in self._copies:
                del self._evictable[block]
                return block
        raise LookupError("no evictable block without findable children")

    def _hand_over(self, block: BlockId, block_hash: BlockHash) -> BlockId:
        """The oldest copy takes the place of a block that was found under its hash."""
        heir, *others = self._copies.pop(block_hash)
        if others:
            self._copies[block_hash] = others
        self._found[block_hash] = heir
        self._parent_of[heir] = self._parent_of[block]
        self._num_children[heir], self._num_children[block] = self._num_children[block], 0
        return heir

    def drain_events(self) -> CacheEvents:
        """Net changes since the last call; at most twice the pool's size waits to be drained."""
        events = CacheEvents(list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> list[BlockHash]:
        """All findable hashes, parents before children."""
        # Parents are added first, and a hash leaves only after its children.
        return list(self._found)
