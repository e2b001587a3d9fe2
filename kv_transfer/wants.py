"""Who is owed slabs of a receiver's link, in turn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.core.ids import AttemptKey, LeaseId


@dataclass(slots=True)
class _Want:
    key: AttemptKey
    slabs: int = 0
    """As the last offer says."""
    again: int = 0
    """Damaged ones, which that offer need not have known of."""


class Wants:
    """Slabs that stand ready at the sender and have no memory yet, by lease."""

    def __init__(self) -> None:
        self._wants: OrderedDict[LeaseId, _Want] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._wants)

    def offer(self, lease: LeaseId, key: AttemptKey, slabs: int) -> None:
        """The last offer counts."""
        if not slabs and lease not in self._wants:
            return
        want = self._want(lease, key)
        want.slabs = slabs
        self._drop_if_empty(lease, want)

    def add_again(self, lease: LeaseId, key: AttemptKey) -> None:
        """A slab came damaged."""
        self._want(lease, key).again += 1

    def first(self) -> tuple[LeaseId, AttemptKey]:
        """Whose turn it is. Raises StopIteration when nothing is wanted."""
        lease, want = next(iter(self._wants.items()))
        return lease, want.key

    def served(self, lease: LeaseId) -> None:
        """The lease has got one slab; it is the others' turn."""
        want = self._wants[lease]
        if want.again:
            want.again -= 1
        else:
            want.slabs -= 1
        self._wants.move_to_end(lease)
        self._drop_if_empty(lease, want)

    def forget(self, lease: LeaseId, key: AttemptKey) -> None:
        want = self._wants.get(lease)
        if want is not None and want.key == key:
            del self._wants[lease]

    def _want(self, lease: LeaseId, key: AttemptKey) -> _Want:
        want = self._wants.get(lease)
        if want is None or want.key != key:
            want = self._wants[lease] = _Want(key)
        return want

    def _drop_if_empty(self, lease: LeaseId, want: _Want) -> None:
        if not want.slabs and not want.again:
            del self._wants[lease]
