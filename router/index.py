"""Which worker holds which blocks: a flat map from block hash to a set of workers.

Chained hashes make a tree unnecessary: a request's own chain is the path, so a lookup walks its
hashes until no worker is left. Sets of workers are bit masks. What a worker holds is a prefix of
any chain, as eviction is leaf first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Hash -> workers, kept by their cache events."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._held: dict[int, set[bytes]] = {}

    def add(self, worker: int, hashes: Iterable[bytes]) -> None:
        """``worker`` (a small number) can serve these blocks now."""
        bit = 1 << worker
        held = self._held.setdefault(worker, set())
        for block in hashes:
            self._holders[block] = self._holders.get(block, 0) | bit
            held.add(block)

    def remove(self, worker: int, hashes: Iterable[bytes]) -> None:
        held = self._held.setdefault(worker, set())
        for block in hashes:
            if block in held:
                held.discard(block)
                self._clear(worker, block)

    def forget(self, worker: int) -> None:
        """Drop all that is known of a worker."""
        for block in self._held.pop(worker, set()):
            self._clear(worker, block)

    def matched_blocks(self, chain: Sequence[bytes], workers: Iterable[int]) -> dict[int, int]:
        """Leading blocks of ``chain`` that each of ``workers`` holds."""
        workers = list(workers)
        matched = dict.fromkeys(workers, 0)
        alive = sum(1 << worker for worker in workers)
        for depth, block in enumerate(chain):
            still = alive & self._holders.get(block, 0)
            for worker in _bits(alive & ~still):
                matched[worker] = depth
            alive = still
            if not alive:
                return matched
        for worker in _bits(alive):
            matched[worker] = len(chain)
        return matched

    def __len__(self) -> int:
        return len(self._holders)

    def _clear(self, worker: int, block: bytes) -> None:
        left = self._holders[block] & ~(1 << worker)
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
