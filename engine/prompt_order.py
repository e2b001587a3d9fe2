"""In which order prompts are computed. Pure: numbers in, numbers out.

By deadline, then shortest remaining, without starvation. Deadlines count by powers of two of the
time left: prompts that have between 8 and 16 seconds are equally urgent, so that the shortest of
them goes first, and none waits longer than it has to for one that has minutes.

NOTE on starvation. A prompt is *overtaken* by every token that is computed of a younger one while
tokens of its own are left. Once that are ``patience`` tokens it is due: it goes before all that are
not, and due prompts go in order of arrival. From then on only prompts that came before it are ahead
of it, so that it is overtaken by less than ``patience`` and the tokens of one more step, whatever
arrives. As every step is filled while a prompt waits, it has its last chunk after at most

    (tokens that were left of older prompts + its own + patience) / tokens per step + 2

steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PATIENCE_STEPS = 8
"""A prompt is overtaken by so many full steps of younger ones at most, and then it is due."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Where a prompt stands."""

    remaining: int
    """Tokens still to compute."""
    time_left_s: float
    overtaken: int = 0
    """Tokens of younger prompts that were computed before its own."""


def urgency(time_left_s: float) -> int:
    """Lower is sooner: the power of two that the time left reaches, between 2^-10 s and 2^20 s."""
    return math.frexp(min(max(time_left_s, 2.0**-10), 2.0**20))[1]


def is_before(wait: Wait, other: Wait, patience: int) -> bool:
    """Whether ``wait``, which came first, is computed before ``other``."""
    return wait.overtaken >= patience or _rank(wait) <= _rank(other)


def prompt_order(waits: Sequence[Wait], patience: int) -> list[int]:
    """Indexes of prompts in the order in which they are computed; ``waits`` in order of arrival."""

    def key(i: int) -> tuple[int, ...]:
        return (0, i) if waits[i].overtaken >= patience else (1, *_rank(waits[i]), i)

    return sorted(range(len(waits)), key=key)


def overtaken(remaining: Sequence[int], counts: Sequence[int]) -> list[int]:
    """By how many tokens each prompt is overtaken in a step that computes ``counts[i]`` of the
    ``remaining[i]`` tokens of each; in order of arrival.
    """
    by = [0] * len(counts)
    younger = 0
    for i in reversed(range(len(counts))):
        if counts[i] < remaining[i]:
            by[i] = younger
        younger += counts[i]
    return by


def _rank(wait: Wait) -> tuple[int, int]:
    return urgency(wait.time_left_s), wait.remaining
