"""Which prompts compute how many tokens in the next step. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable


def share_budget(remaining: Iterable[int], max_tokens: int, max_seqs: int) -> list[int]:
    """Tokens for each prompt in order of arrival, from a budget of ``max_tokens`` per step.

    A prompt longer than what is left takes the rest and goes on in the next step (chunked prefill).
    Returns one count per prompt of the leading prompts that get any.
    """
    counts: list[int] = []
    left = max_tokens
    for tokens in remaining:
        if left == 0 or len(counts) == max_seqs:
            break
        counts.append(min(tokens, left))
        left -= counts[-1]
    return counts
