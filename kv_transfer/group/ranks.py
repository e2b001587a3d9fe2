"""The way from rank 0's KV plane to those of the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.errors import RankLost
from kvferry.kv_transfer.group.orders import Blocks, Order, encode

Send = Callable[[bytes], None]
"""To all other ranks, in order. Raises RankLost."""


class Ranks:
    """``count`` ranks besides rank 0. Orders reach each in the order in which they are given."""

    def __init__(self, count: int, send: Send, generations: NDArray[np.uint32]) -> None:
        """``generations``: the block pool's live array; changed on the step loop's thread."""
        self.count = count
        self._send = send
        self._live = generations
        self._told = np.zeros_like(generations)

    def tell(self, order: Order) -> None:
        """With the blocks that changed hands before. On the step loop's thread alone; raises
        RankLost.
        """
        if not self.count:
            return
        changed = np.flatnonzero(self._live != self._told)
        if len(changed):
            self._told[changed] = self._live[changed]
            self._send(encode(Blocks(changed, self._live[changed])))
        self._send(encode(order))

    def tell_if_there(self, order: Order) -> None:
        """From any thread. A rank that is gone needs no orders: the worker ends with it."""
        if self.count:
            with contextlib.suppress(RankLost):
                self._send(encode(order))
