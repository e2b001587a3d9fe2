"""What the fake model must answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.engine.fake_runner import fake_output

VOCAB_SIZE = 97
EOS = 96


def expected(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """The first output tokens of the fake model, computed without any of the system."""
    return fake_output(prompt, num_tokens, VOCAB_SIZE, seed)
