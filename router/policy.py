"""Where a request goes: which prefill worker computes its prompt, which decode worker its
tokens. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that could take the request now."""

    number: int
    cached_tokens: int
    """Leading tokens of the request that it holds."""
    load: int
    """Prefill: tokens before it. Decode: sequences on it."""


class Policy(Protocol):
    """Chooses among workers that have room; whoever has none is not offered."""

    def choose(
        self, num_tokens: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[int, int]:
        """Numbers of the (prefill, decode) workers for a request of ``num_tokens`` known tokens.

        Neither sequence is empty.
        """
        ...


class LongestPrefixThenLeastLoaded:
    """On either side: most cached tokens, then least load, then the lowest number."""

    def choose(
        self, num_tokens: int, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[int, int]:
        return _best(prefill), _best(decode)


def _best(candidates: Sequence[Candidate]) -> int:
    return min(candidates, key=lambda c: (-c.cached_tokens, c.load, c.number)).number
