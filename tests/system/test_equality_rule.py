"""The comparison itself: what it accepts, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from near_ties import NearTies
from torch import Tensor


def exact(tokens: Sequence[int]) -> Tensor:
    """Tokens 4 and 5 are a near-tie behind an even number of tokens; else 4 is clearly first."""
    near = len(tokens) % 2 == 0
    return torch.tensor([0.0, 0, 0, 0, 2.0, 2.0 - (9e-4 if near else 2e-3)], dtype=torch.float64)


def test_equal_answers_ask_no_reference() -> None:
    ties = NearTies(lambda tokens: pytest.fail("asked"))
    ties.compare("same", [1, 2], [4, 4, 3], [4, 4, 3])
    assert not ties.found


def test_a_near_tie_is_counted_and_ends_the_comparison() -> None:
    ties = NearTies(exact)
    ties.compare("tie", [1], [4, 5, 0, 0], [4, 4, 1, 2])
    assert ties.found == ["tie, token 1: 5 for 4, 9.00e-04 apart"]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 4], [4, 4]),  # not near
        ([4, 0], [4, 4]),  # another token altogether
        ([4], [4, 4]),
        ([4, 4, 1], [4, 4]),
        ([], [4]),
    ],
)
def test_everything_else_is_refused(tokens: list[int], expected: list[int]) -> None:
    with pytest.raises(AssertionError):
        NearTies(exact).compare("wrong", [1], tokens, expected)
