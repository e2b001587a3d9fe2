"""Penalties, biases and bans on small rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.engine.logit_edits import apply_edits
from kvferry.engine.plan import LogitEdits

torch.set_num_threads(1)

ROW = [2.0, -1.0, 0.5, 3.0]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (LogitEdits(), ROW),
        (LogitEdits(presence_penalty=0.5, output_ids=ids(0, 0, 3)), [1.5, -1.0, 0.5, 2.5]),
        (LogitEdits(frequency_penalty=0.5, output_ids=ids(0, 0, 3)), [1.0, -1.0, 0.5, 2.5]),
        (LogitEdits(frequency_penalty=-1.0, output_ids=ids(1)), [2.0, 0.0, 0.5, 3.0]),
        (LogitEdits(presence_penalty=0.5, prompt_ids=ids(0, 1)), ROW),
        (
            LogitEdits(repetition_penalty=2.0, prompt_ids=ids(0, 1, 1), output_ids=ids(0, 2)),
            [1.0, -2.0, 0.25, 3.0],
        ),
        (LogitEdits(repetition_penalty=0.5, output_ids=ids(1, 3)), [2.0, -0.5, 0.5, 6.0]),
        (LogitEdits(logit_bias={1: 5.0, 3: -100.0}), [2.0, 4.0, 0.5, -97.0]),
        (LogitEdits(banned_ids=(3, 0)), [-np.inf, -1.0, 0.5, -np.inf]),
        (LogitEdits(banned_ids=(3,), logit_bias={3: 100.0}), [2.0, -1.0, 0.5, -np.inf]),
        (
            LogitEdits(
                repetition_penalty=2.0,
                frequency_penalty=0.25,
                presence_penalty=0.5,
                logit_bias={0: 1.0},
                output_ids=ids(0, 0),
            ),
            [2.0 / 2 - 2 * 0.25 - 0.5 + 1.0, -1.0, 0.5, 3.0],
        ),
        # Ids past the row, such as those of padded embedding rows, change nothing.
        (LogitEdits(logit_bias={4: 5.0}, banned_ids=(9,)), ROW),
        (LogitEdits(repetition_penalty=2.0, prompt_ids=ids(7)), ROW),
        (LogitEdits(presence_penalty=1.0, output_ids=None), ROW),
    ],
)
def test_edits(edit: LogitEdits, expected: list[float]) -> None:
    logits = torch.tensor([ROW, ROW])
    apply_edits(logits, {1: edit})
    assert logits.tolist() == [ROW, pytest.approx(expected)]


def test_no_edits_touch_nothing() -> None:
    logits = torch.tensor([ROW])
    apply_edits(logits, {})
    assert logits.tolist() == [ROW]
