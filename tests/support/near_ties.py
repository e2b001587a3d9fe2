"""The rule on near-ties (design: section 5) for greedy tokens in single precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torch import Tensor

NEAR_TIE = 1e-3


@dataclass(slots=True)
class NearTies:
    """Accepts a first difference only where the exact logits of both candidates nearly agree."""

    exact: Callable[[Sequence[int]], Tensor]
    """Tokens -> float64 logits [V] of the next one."""
    found: list[str] = field(default_factory=list)

    def compare(
        self, name: str, prompt: Sequence[int], tokens: Sequence[int], expected: Sequence[int]
    ) -> None:
        """Raises AssertionError unless equal up to a near-tie, behind which the texts part."""
        pairs = enumerate(zip_longest(tokens, expected))
        at = next((i for i, (ours, theirs) in pairs if ours != theirs), None)
        if at is None:
            return
        assert at < min(len(tokens), len(expected)), (
            f"{name}: {tokens} is not as long as {expected}"
        )
        ours, theirs = tokens[at], expected[at]
        logits = self.exact([*prompt, *expected[:at]])
        gap = float(logits[theirs] - logits[ours])
        said = f"{name}, token {at}: {ours} for {theirs}, {gap:.2e} apart"
        assert abs(gap) < NEAR_TIE, said
        self.found.append(said)
