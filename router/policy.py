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


def computes_locally(
    num_tokens: int, decode: Candidate, prefill: Sequence[Candidate], most_tokens: int
) -> bool:
    """Whether a decode worker should compute itself what it lacks of ``num_tokens`` tokens, and no
    KV should move: the pair (D, D).

    It should where that is cheaper than the best prefill worker, in tokens to be computed before
    the first one is known, and at most ``most_tokens``: they are computed beside its decodes, whose
    steps must stay short. Here the load of all candidates is in tokens.
    """
    lacking = num_tokens - decode.cached_tokens
    if lacking > most_tokens:
        return False
    remote = (c.load + num_tokens - c.cached_tokens for c in prefill)
    return decode.load + lacking < min(remote, default=float("inf"))


def _best(candidates: Sequence[Candidate]) -> int:
    return min(candidates, key=lambda c: (-c.cached_tokens, c.load, c.number)).number
