"""Penalties, biases and bans on the logits of single rows.

In this order, with c the count of a token in the output so far:

    repetition   x / r if x > 0, else x * r    prompt and output   Keskar et al. 2019 (CTRL)
    frequency    x - f * c                     output              OpenAI API
    presence     x - p                         output              OpenAI API
    bias         x + b                         the ids it names    OpenAI API
    ban          -inf                          the ids it names
"""

from __future__ import annotations

import numpy as np
import torch

from kvferry.engine.plan import Int32, LogitEdits


def apply_edits(logits: torch.Tensor, edits: dict[int, LogitEdits]) -> None:
    """Edit rows of ``logits`` [num_rows, vocab_size] in place; ids that it lacks are ignored."""
    for row, edit in edits.items():
        _edit_row(logits[row], edit)


def _edit_row(logits: torch.Tensor, edit: LogitEdits) -> None:
    if edit.repetition_penalty != 1.0:
        seen, _ = _counts(logits, edit.prompt_ids, edit.output_ids)
        values = logits[seen]
        penalty = edit.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if edit.frequency_penalty or edit.presence_penalty:
        ids, counts = _counts(logits, edit.output_ids)
        logits[ids] -= edit.frequency_penalty * counts + edit.presence_penalty
    if edit.logit_bias:
        # A dict has each id once, so that plain indexing adds each bias once.
        ids, biases = _within(logits, list(edit.logit_bias), list(edit.logit_bias.values()))
        logits[ids] += biases
    if edit.banned_ids:
        ids, _ = _within(logits, list(edit.banned_ids), [0.0] * len(edit.banned_ids))
        logits[ids] = -torch.inf


def _counts(logits: torch.Tensor, *parts: Int32 | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct token ids of some arrays, and how often each occurs, in the logits' dtype."""
    tokens = np.concatenate([np.zeros(0, np.int32), *(part for part in parts if part is not None)])
    ids, counts = np.unique(tokens, return_counts=True)
    return _within(logits, ids.tolist(), counts.tolist())


def _within(
    logits: torch.Tensor, ids: list[int], values: list[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.tensor(ids, dtype=torch.int64, device=logits.device)
    value = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    inside = (index >= 0) & (index < logits.shape[-1])
    return index[inside], value[inside]
