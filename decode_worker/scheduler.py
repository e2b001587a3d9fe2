"""Which sequences compute how many tokens in the next step. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable


def share_budget(
    num_decoding: int, remaining: Iterable[int], max_tokens: int, max_seqs: int
) -> list[int]:
    """Prefill tokens for each local prompt in order of arrival, behind all decoding sequences.

    A step is filled first with one token of every running sequence, which therefore never waits,
    then with prefill chunks (Sarathi-Serve, arXiv 2403.02310). Without local prompts it is plain
    continuous batching. A prompt is never starved: at least one token of the first is computed.
    """
    counts: list[int] = []
    left = max(max_tokens - num_decoding, 1)
    for tokens in remaining:
        if left == 0 or num_decoding + len(counts) >= max_seqs:
            break
        counts.append(min(tokens, left))
        left -= counts[-1]
    return counts
