"""Which blocks are findable, under which hash, and which of them to give up first.

    hash -> Entry(block, parent, children, copies)   what a request's own hashes are walked along
    block -> Entry                                   of blocks whose content is known, copies too
    evictable                                        cached blocks that nothing holds, longest
                                                     unused first; only leaves are given up

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
from dataclasses import dataclass

from kvferry.core.ids import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Net changes of the set of findable hashes; no hash is in both lists."""

    added: list[BlockHash]
    """Parents before children."""
    removed: list[BlockHash]


@dataclass(slots=True, eq=False)
class _Entry:
    block: BlockId
    block_hash: BlockHash
    parent: _Entry | None
    """None at the root."""
    num_children: int = 0
    """Findable ones."""
    copies: tuple[BlockId, ...] = ()
    """Oldest first."""


class PrefixIndex:
    """The findable blocks of one pool. Blocks of one chain must be added parents first."""

    def __init__(self, num_blocks: int) -> None:
        self._entries: dict[BlockHash, _Entry] = {}
        self._entry_of: list[_Entry | None] = [None] * num_blocks
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
        entry = self._entry_of[block]
        return None if entry is None else entry.block_hash

    def is_findable(self, block: BlockId) -> bool:
        entry = self._entry_of[block]
        return entry is not None and entry.block == block

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
        entries, entry_of = self._entries, self._entry_of
        added, removed = self._added, self._removed
        for block, block_hash, parent_hash in zip(blocks, hashes, parents, strict=True):
            known = entry_of[block]
            if known is not None:
                if known.block_hash != block_hash:
                    return block
                continue
            entry = entries.get(block_hash)
            if entry is not None:
                entry_of[block] = entry
                entry.copies = (*entry.copies, block)
                continue
            parent = entries.get(parent_hash)
            if parent is not None:
                parent.num_children += 1
            entries[block_hash] = entry_of[block] = _Entry(block, block_hash, parent)
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
        entry = self._entry_of[block]
        assert entry is not None, "a block of unknown content is no copy"
        self._entry_of[block] = None
        entry.copies = tuple(copy for copy in entry.copies if copy != block)
        if entry.block in self._evictable:
            self._evictable.move_to_end(entry.block)

    def evict(self) -> tuple[BlockId, BlockId | None]:
        """Give up the longest unused leaf: (that block, the copy that takes over its hash or None).

        Raises LookupError when no block can be given up.
        """
        for block in self._evictable:
            entry = self._entry_of[block]
            assert entry is not None, "only findable blocks are offered"
            if entry.copies or not entry.num_children:
                return block, self._give_up(entry)
        raise LookupError("no evictable block without findable children")

    def _give_up(self, entry: _Entry) -> BlockId | None:
        del self._evictable[entry.block]
        self._entry_of[entry.block] = None
        if entry.copies:
            entry.block, *rest = entry.copies
            entry.copies = tuple(rest)
            return entry.block
        del self._entries[entry.block_hash]
        if entry.parent is not None:
            entry.parent.num_children -= 1
        if entry.block_hash in self._added:
            del self._added[entry.block_hash]
        else:
            self._removed[entry.block_hash] = None
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
