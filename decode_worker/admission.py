"""The ledger: whether a sequence may come in now, for the first time or from host memory. Pure.

It counts what runs, what is reserved or in flight, and what sequences will grow by next. Blocks
that run, are reserved or in flight are out of the pool already, so the pool's free count less the
growth to come is what a newcomer may take.

NOTE on progress. After each admission there is room for the next ``growth_tokens`` of all that
hold blocks: whoever is let in computes as many tokens before anybody has to go. A sequence that was
given back once comes in *guaranteed*: with room to its end, and it is never made to go again. What
all guaranteed ones hold and will need is never more than the pool, so that with the others gone
they finish.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ledger:
    """The limits of one decode worker."""

    num_blocks: int
    block_size: int
    max_model_len: int
    growth_tokens: int

    def never_fits(self, length: int) -> str | None:
        """Why a sequence could not run even on an empty worker, or None.

        ``length`` is the tokens it arrives with; one more has to follow for it to be of use here.
        """
        if length < 1:
            return "an empty sequence has no position to sample after"
        if length >= self.max_model_len:
            return f"{length} tokens leave no room in {self.max_model_len}"
        if self._blocks(length + 1) > self.num_blocks:
            return f"{length} tokens and one more need more than all {self.num_blocks} blocks"
        return None

    def admits(self, num_free: int, fresh: int, held_growth: int | None, own_growth: int) -> bool:
        """Whether a newcomer may take ``fresh`` blocks, and ``own_growth`` soon.

        ``held_growth`` is what the sequences that hold blocks may need next, None when there are
        none: what fits alone is let in alone.
        """
        if held_growth is None:
            return num_free >= fresh
        return num_free >= fresh + held_growth + own_growth

    def growth(
        self, lengths: NDArray[np.int64], most: NDArray[np.int64], guaranteed: NDArray[np.bool_]
    ) -> int:
        """Blocks that sequences of ``lengths`` may need within their next ``growth_tokens``, and
        ``guaranteed`` ones to their end at ``most``.
        """
        ahead = np.minimum(lengths + self.growth_tokens, most)
        ahead = np.where(guaranteed, np.maximum(most, lengths), ahead)
        return int((self._blocks(ahead) - self._blocks(lengths)).sum())

    @overload
    def _blocks(self, tokens: int) -> int: ...

    @overload
    def _blocks(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]: ...

    def _blocks(self, tokens: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        return -(-tokens // self.block_size)
