"""Which sequences compute how many tokens in the next step, and which have to go when blocks run
out. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def prefill_budget(num_decoding: int, max_tokens: int, max_seqs: int) -> tuple[int, int]:
    """(tokens, prompts) that a step computes at most behind all decoding sequences.

    A step is filled first with one token of every running sequence, which therefore never waits,
    then with prefill chunks (Sarathi-Serve, arXiv 2403.02310). Without local prompts it is plain
    continuous batching. Prompts are never starved: at least one token of the first is computed.
    """
    return max(max_tokens - num_decoding, 1), max_seqs - num_decoding


def victims(
    lacking: Sequence[bool], guaranteed: Sequence[bool], frees: Callable[[int], int], num_free: int
) -> list[int]:
    """Which sequences have to give up their blocks, newest first, so that each of the others that
    is ``lacking`` a block can have one.

    The sequences are in order of age, the oldest first. ``frees(i)``: blocks that nobody else
    holds. Guaranteed ones stay, and so does the last one of all: its blocks would help nobody.
    Empty when the others' blocks would not help either, or none is missing.
    """
    missing = sum(lacking) - num_free
    chosen: list[int] = []
    for i in reversed(range(len(lacking))):
        if missing <= 0 or len(chosen) == len(lacking) - 1:
            break
        if not guaranteed[i]:
            chosen.append(i)
            missing -= frees(i) + lacking[i]
    return chosen
