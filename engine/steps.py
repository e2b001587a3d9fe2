"""From sequences to a step plan, and from a step result back into the sequences. Same for both
roles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from kvferry.core.request import FinishReason
from kvferry.engine.commit import StopRules
from kvferry.engine.plan import Int32, StepPlan, StepResult
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.table import Rows, build_ahead, build_plan, fill_ahead


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is planned or running: ``seqs[i]`` has table row ``rows[i]``."""

    seqs: list[WorkerSequence]
    rows: Rows
    plan: StepPlan
    sampled_rows: Rows
    """Of the sampled tokens, in order."""

    def invalid(self, result: StepResult) -> list[WorkerSequence]:
        """The sequences whose logits were not finite, each once."""
        return list(dict.fromkeys(self.seqs[self.plan.sampled[i]] for i in result.invalid))


_row = attrgetter("row")


def rows_of(seqs: Sequence[WorkerSequence]) -> Rows:
    """Their table rows, in order."""
    return np.fromiter(map(_row, seqs), np.int64, len(seqs))


class Stepper:
    """Builds and settles the steps of one worker, one at a time."""

    def __init__(self, sequences: Sequences, rules: StopRules) -> None:
        self._sequences = sequences
        self._rules = rules
        self._number = 0
        self._suspects: deque[tuple[WorkerSequence, int]] = deque()

    def build(
        self,
        seqs: list[WorkerSequence],
        counts: Sequence[int] | Int32,
        rows: Rows | None = None,
    ) -> Step:
        """The step in which ``seqs[i]`` computes its next ``counts[i]`` tokens. ``rows``: theirs,
        where they are known.
        """
        self._number += 1
        rows = rows_of(seqs) if rows is None else rows
        table = self._sequences.table
        plan = build_plan(table, self._number, rows, np.asarray(counts, np.int32))
        step = Step(seqs, rows, plan, rows[plan.sampled])
        self._rules.add_edits(plan.sampling, step.sampled_rows, self._sequences.by_row)
        return step

    def build_ahead(
        self, seqs: list[WorkerSequence], rows: Rows, pending: NDArray[np.bool_]
    ) -> Step:
        """The decode step after the one that computes, of which those ``pending`` are part. It may
        never come: ``begin_ahead`` makes it the next.
        """
        plan = build_ahead(self._sequences.table, self._number + 1, rows, pending)
        return Step(seqs, rows, plan, rows)

    def begin_ahead(self, step: Step) -> None:
        """All that was pending is known, and nothing else has changed for its sequences."""
        self._number += 1
        fill_ahead(self._sequences.table, step.rows, step.plan)
        self._rules.add_edits(step.plan.sampling, step.rows, self._sequences.by_row)

    def failed(self, step: Step) -> list[WorkerSequence]:
        """The sequences to fail after a step that could not be run.

        Of several any one may be the cause: none fails yet, and each is tried again by itself, so
        that one poisonous request does not take its neighbours with it. A step that was not run
        has changed nothing but KV that will be written again.
        """
        if len(step.seqs) == 1:
            return step.seqs
        counts = step.plan.query_lens.tolist()
        self._suspects.extend(zip(step.seqs, counts, strict=True))
        return []

    def next_suspect(self) -> tuple[WorkerSequence, int] | None:
        """The sequence that must make up the next step alone, if any must, and its tokens.

        They are those of the step that failed: some of its layers may be on their way to another
        worker already, which counts on the others of the same tokens to follow.
        """
        while self._suspects:
            seq, count = self._suspects.popleft()
            if seq.state is not State.CLOSED:
                return seq, count
        return None

    def settle(self, step: Step, result: StepResult) -> dict[int, FinishReason]:
        """Take in new KV and new tokens. Returns sampled index -> reason for what has ended.

        Rows whose logits were invalid are the caller's to fail: ``Step.invalid``.
        """
        sequences, table = self._sequences, self._sequences.table
        context = step.plan.context_lens
        computed = context + step.plan.query_lens
        table.computed[step.rows] = computed
        # Those that have passed the end of a block.
        full = (computed % table.block_size < step.plan.query_lens).nonzero()[0]
        sequences.publish_all([step.seqs[i] for i in full.tolist()], computed[full].tolist())
        rows, positions = step.sampled_rows, step.plan.sampling.position
        token_ids = result.token_ids
        if table.num_samples:
            # Of several samples of a row the first is its own.
            own = np.ones(len(rows), np.bool_)
            own[1:] = rows[1:] != rows[:-1]
            table.append(rows[own], positions[own], token_ids[own])
        else:
            table.append(rows, positions, token_ids)
        return self._rules.finished(rows, positions + 1, token_ids)
