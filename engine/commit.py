"""What follows a step: new tokens into the table, stop rules, and edits for the next sampling.

Stop rules are the same for the first token, sampled where the prompt was computed, and for every
later one: end-of-sequence and stop token ids once min_tokens are out, max_tokens and the context
limit always. Stop strings need text and are the router's.
"""

from __future__ import annotations

import numpy as np

from kvferry.core.request import FinishReason
from kvferry.engine.plan import Int64, LogitEdits, RowLogprobs, SamplingRows
from kvferry.engine.sequences import WorkerSequence
from kvferry.engine.table import Rows, SequenceTable
from kvferry.proto import worker_pb2 as pb


class StopRules:
    """Decides for a whole step which rows are done."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table

    def finished(self, rows: Rows, length: Int64, token_ids: Int64) -> dict[int, FinishReason]:
        """Index into ``rows`` -> reason, for the rows whose newest token ends them; ``length``
        counts it.
        """
        full = length >= self._table.max_length[rows]
        done = dict.fromkeys(full.nonzero()[0].tolist(), FinishReason.LENGTH)
        stops = self._stopped(rows, token_ids, length)
        return done | dict.fromkeys(stops, FinishReason.STOP)

    def _stopped(self, rows: Rows, token_ids: Int64, length: Int64) -> list[int]:
        table = self._table
        is_stop = table.stop_ids.take(rows, axis=1) == token_ids
        more = table.more_stop_ids
        if not (more or is_stop.any()):
            return []  # as in most steps
        stopped = is_stop.any(axis=0)
        if more:
            for i, row in enumerate(rows.tolist()):
                if row in more and int(token_ids[i]) in more[row]:
                    stopped[i] = True
        stopped &= length >= table.min_length[rows]
        found: list[int] = stopped.nonzero()[0].tolist()
        return found

    def add_edits(
        self, sampling: SamplingRows, rows: Rows, by_row: dict[int, WorkerSequence]
    ) -> None:
        """Fill in what only some rows need. ``rows`` are the sampled rows, in order."""
        table = self._table
        if not table.special:
            return  # as in most steps
        before_min = table.length[rows] < table.min_length[rows]
        for i in np.flatnonzero(table.edited[rows] | before_min):
            row = int(rows[i])
            wanted = by_row[row].spec.sampling
            if wanted.HasField("logprobs"):
                sampling.logprobs[int(i)] = wanted.logprobs
            edits = self._edits(row, wanted)
            if edits is not None:
                sampling.edits[int(i)] = edits

    def _edits(self, row: int, wanted: pb.Sampling) -> LogitEdits | None:
        table = self._table
        length = int(table.length[row])
        banned: tuple[int, ...] = ()
        if length < table.min_length[row]:
            eos = () if wanted.ignore_eos else table.eos_token_ids
            banned = (*eos, *wanted.stop_token_ids)
        penalised = (
            wanted.presence_penalty or wanted.frequency_penalty or wanted.repetition_penalty != 1.0
        )
        if not (banned or penalised or wanted.logit_bias):
            return None
        prompt_len = int(table.prompt_len[row])
        return LogitEdits(
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            repetition_penalty=wanted.repetition_penalty,
            logit_bias=dict(wanted.logit_bias),
            banned_ids=banned,
            prompt_ids=table.tokens[row, :prompt_len] if penalised else None,
            output_ids=table.tokens[row, prompt_len:length] if penalised else None,
        )


def logprob_message(logprobs: RowLogprobs) -> pb.Logprob:
    top = [pb.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return pb.Logprob(token_id=logprobs.token_id, logprob=logprobs.logprob, top=top)
