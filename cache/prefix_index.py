"""Which blocks are findable, under which hash, and which of them to give up first.

    hash -> Entry(block, parent, copies)    the map that a request's own hashes are walked along
    parent -> number of findable children   leaf first: only blocks without any are given up
    evictable                               cached blocks that nothing holds, longest unused first

NOTE on order. Whoever uses a block also uses its parents, and releases them together, deeper blocks
first. So in order of release a child always stands before its parent, and plain LRU is leaf first.
The one exception is a *copy*: two sequences fill the same block; the first is findable, the second
stays anonymous and is remembered here. Freeing a copy therefore refreshes the findable block; and
when the findable one is given up while a copy is still held, the copy takes over its hash. With
this, every evictable block can be given up at some point without touching a block that is held, so
their number is exactly what can be allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.core.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Net changes of the set of findable hashes; no hash is in both lists."""

    added: list[BlockHash]
    """Parents before children."""
    removed: list[BlockHash]


@dataclass(slots=True)
class _Entry:
    block: BlockId
    parent: BlockHash
    copies: list[BlockId] = field(default_factory=list)


class PrefixIndex:
    """The findable blocks of one pool. Blocks of one chain must be added parents first."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, _Entry] = {}
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._children: dict[BlockHash, int] = {}
        # Keeps the order, removes anywhere, and finds the first in constant time; a plain dict
        # would walk over all that left its front before.
        self._evictable: OrderedDict[BlockId, None] = OrderedDict()
        self._added: dict[BlockHash, None] = {}
        self._removed: dict[BlockHash, None] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def match(self, hashes: Sequence[BlockHash]) -> list[BlockId]:
        """Blocks of the longest findable prefix of a chain."""
        found: list[BlockId] = []
        for block_hash in hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            found.append(entry.block)
        return found

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """Hash of the content of a block, be it findable or a copy."""
        return self._hash_of.get(block)

    def is_findable(self, block: BlockId) -> bool:
        block_hash = self._hash_of.get(block)
        return block_hash is not None and self._entries[block_hash].block == block

    def add(self, block: BlockId, block_hash: BlockHash, parent: BlockHash) -> bool:
        """Make a block findable; False when the hash is taken, which leaves it an unnamed copy."""
        self._hash_of[block] = block_hash
        entry = self._entries.get(block_hash)
        if entry is not None:
            entry.copies.append(block)
            return False
        self._entries[block_hash] = _Entry(block, parent)
        self._children[parent] = self._children.get(parent, 0) + 1
        _record(block_hash, self._added, self._removed)
        return True

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
        entry = self._entries[self._hash_of.pop(block)]
        entry.copies.remove(block)
        if entry.block in self._evictable:
            del self._evictable[entry.block]
            self._evictable[entry.block] = None

    def evict(self) -> tuple[BlockId, BlockId | None]:
        """Give up the longest unused leaf: (that block, the copy that takes over its hash or None).

        Raises LookupError when no block can be given up.
        """
        for block in self._evictable:
            entry = self._entries[self._hash_of[block]]
            if entry.copies or not self._children.get(self._hash_of[block]):
                return block, self._give_up(block, entry)
        raise LookupError("no evictable block without findable children")

    def _give_up(self, block: BlockId, entry: _Entry) -> BlockId | None:
        del self._evictable[block]
        block_hash = self._hash_of.pop(block)
        if entry.copies:
            entry.block = entry.copies.pop(0)
            return entry.block
        del self._entries[block_hash]
        if self._children[entry.parent] == 1:
            del self._children[entry.parent]
        else:
            self._children[entry.parent] -= 1
        _record(block_hash, self._removed, self._added)
        return None

    def drain_events(self) -> CacheEvents:
        """Net changes since the last call; at most twice the pool's size waits to be drained."""
        events = CacheEvents(list(self._added), list(self._removed))
        self._added.clear()
        self._removed.clear()
        return events

    def snapshot(self) -> list[BlockHash]:
        """All findable hashes, parents before children."""
        # Parents are added first, and a hash leaves only after its children.
        return list(self._entries)


def _record(
    block_hash: BlockHash, happened: dict[BlockHash, None], opposite: dict[BlockHash, None]
) -> None:
    if block_hash in opposite:
        del opposite[block_hash]
    else:
        happened[block_hash] = None
