"""From logits to tokens by the ops of the dispatch table: the meaning of ``sampler``, on a device.

R sampled rows, V vocabulary ids. Parameters are uploaded and tokens fetched once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from kvferry.engine.host_copy import HostCopy, to_host
from kvferry.engine.plan import LogitEdits, RowLogprobs, SamplingRows, StepResult
from kvferry.kernels.ops import Ops
from kvferry.kernels.sampling.tensors import (
    EditTensors,
    Penalties,
    RaggedIds,
    SampledTokens,
    SamplingTensors,
)
from kvferry.kernels.upload import uploaded


@dataclass(slots=True, eq=False)
class Drawn:
    """The tokens of a step, which its device may still be drawing. An InFlight."""

    copy: HostCopy
    """Tokens and whether they are invalid; then, where rows want log-probabilities, those of the
    tokens, ids and values of the likeliest.
    """
    wanted: dict[int, int]
    """Row -> number of top log-probabilities, in the order of those."""

    def done(self) -> bool:
        return self.copy.done()

    def wait(self) -> StepResult:
        token_ids, invalid, *logprobs = self.copy.wait()
        result = StepResult(token_ids=token_ids.numpy())
        result.invalid = tuple(invalid.nonzero().flatten().tolist())
        if logprobs:
            chosen, ids, values = (part.tolist() for part in logprobs)
            for i, (row, count) in enumerate(self.wanted.items()):
                if row not in result.invalid:
                    top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
                    token = int(result.token_ids[row])
                    result.logprobs[row] = RowLogprobs(token_id=token, logprob=chosen[i], top=top)
        return result


class KernelSampler:
    """Draws the tokens of a step."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def __call__(self, logits: torch.Tensor, rows: SamplingRows, vocab_size: int) -> StepResult:
        """One token per row of ``logits`` [R, >= vocab_size], as ``sampler.sample`` draws them."""
        return self.draw(logits, rows, vocab_size).wait()

    def draw(self, logits: torch.Tensor, rows: SamplingRows, vocab_size: int) -> Drawn:
        """The same, without waiting for a device."""
        edited = logits
        if rows.edits:
            edits = self._edit_tensors(rows.edits, len(logits), vocab_size, logits.device)
            edited = self._ops.apply_edits(logits, edits, vocab_size)
        params = sampling_tensors(rows, logits.device)
        drawn: SampledTokens = self._ops.sample(edited, params, vocab_size, bool(rows.edits))
        found = [drawn.token_ids, drawn.invalid]
        if rows.logprobs:
            found += self._logprobs(logits, rows.logprobs, drawn, vocab_size)
        return Drawn(to_host(found), rows.logprobs)

    def _logprobs(
        self, logits: torch.Tensor, wanted: dict[int, int], drawn: SampledTokens, vocab_size: int
    ) -> list[torch.Tensor]:
        """Of the rows that want any; those of invalid rows mean nothing."""
        index = uploaded(np.array(list(wanted), np.int32), logits.device)
        most = min(max(wanted.values()), vocab_size)
        found = self._ops.top_logprobs(
            logits, index, drawn.token_ids[index.long()], most, vocab_size
        )
        return [found.chosen, found.ids, found.values]

    def _edit_tensors(
        self, edits: dict[int, LogitEdits], num_rows: int, vocab_size: int, device: torch.device
    ) -> EditTensors:
        none = LogitEdits()
        per_row = [edits.get(row, none) for row in range(num_rows)]
        return EditTensors(
            penalties=self._penalties(per_row, vocab_size, device),
            bias=_ragged(
                [list(edit.logit_bias) for edit in per_row],
                device,
                [list(edit.logit_bias.values()) for edit in per_row],
            ),
            banned=_ragged([edit.banned_ids for edit in per_row], device),
        )

    def _penalties(
        self, edits: Sequence[LogitEdits], vocab_size: int, device: torch.device
    ) -> Penalties | None:
        """Counts of the rows that are penalised, from their histories."""
        penalised = [i for i, edit in enumerate(edits) if _is_penalised(edit)]
        if not penalised:
            return None
        counts = torch.zeros(len(penalised), vocab_size, dtype=torch.int32, device=device)
        for name, is_prompt in (("prompt_ids", True), ("output_ids", False)):
            histories = [getattr(edits[row], name) for row in penalised]
            ids = [np.zeros(0, np.int32) if part is None else part for part in histories]
            slots = np.repeat(np.arange(len(ids), dtype=np.int32), [len(part) for part in ids])
            tokens = np.concatenate(ids).astype(np.int32)
            self._ops.add_tokens(
                counts, uploaded(slots, device), uploaded(tokens, device), is_prompt
            )
        slot = np.full(len(edits), -1, np.int32)
        slot[penalised] = np.arange(len(penalised))
        return Penalties(
            counts=counts,
            slot=uploaded(slot, device),
            repetition=_floats([edit.repetition_penalty for edit in edits], device),
            frequency=_floats([edit.frequency_penalty for edit in edits], device),
            presence=_floats([edit.presence_penalty for edit in edits], device),
        )


def sampling_tensors(rows: SamplingRows, device: torch.device) -> SamplingTensors:
    """The parameters of a step's rows on a device."""
    filtered = bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())
    return SamplingTensors(
        temperature=uploaded(rows.temperature, device),
        top_k=uploaded(rows.top_k, device),
        top_p=uploaded(rows.top_p, device),
        min_p=uploaded(rows.min_p, device),
        seed=uploaded(rows.seed.view(np.int64), device),
        sample_index=uploaded(rows.sample_index, device),
        position=uploaded(rows.position, device),
        filtered=filtered,
    )


def _is_penalised(edit: LogitEdits) -> bool:
    return edit.repetition_penalty != 1.0 or bool(edit.frequency_penalty or edit.presence_penalty)


def _ragged(
    ids: Sequence[Sequence[int]],
    device: torch.device,
    values: Sequence[Sequence[float]] | None = None,
) -> RaggedIds | None:
    """None when no row has any."""
    if not any(ids):
        return None
    offsets = [0, *accumulate(len(row) for row in ids)]
    return RaggedIds(
        ids=uploaded(np.array([i for row in ids for i in row], np.int32), device),
        offsets=uploaded(np.array(offsets, np.int32), device),
        values=None if values is None else _floats([x for row in values for x in row], device),
    )


def _floats(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return uploaded(np.array(values, np.float32), device)
