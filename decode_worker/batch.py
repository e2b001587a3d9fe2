"""The sequences that a decode worker computes: one token of each per step, and chunks of local
prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from kvferry.core.request import FinishReason
from kvferry.decode_worker.scheduler import prefill_budget, victims
from kvferry.engine.first_token import FirstToken, first_tokens
from kvferry.engine.plan import Int64, RowLogprobs, StepPlan, StepResult
from kvferry.engine.ports import Gate
from kvferry.engine.prompts import PromptPlanner
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.steps import Step, Stepper, rows_of
from kvferry.engine.swaps import SWAP_FENCE
from kvferry.engine.table import Rows

_age_order = attrgetter("age_order")


@dataclass(slots=True)
class StepTokens:
    """The tokens of the running sequences; ``finished`` and ``logprobs`` are keyed by index."""

    rows: Rows
    token_ids: Int64
    finished: dict[int, FinishReason]
    logprobs: dict[int, RowLogprobs]


class DecodeBatch:
    """DECODING sequences, oldest first, and local PREFILLING ones in order of arrival."""

    def __init__(
        self, sequences: Sequences, stepper: Stepper, gate: Gate, max_tokens: int, max_seqs: int
    ) -> None:
        self.running: list[WorkerSequence] = []
        self.prompts: list[WorkerSequence] = []
        self._sequences = sequences
        self._planner = PromptPlanner(sequences, max_tokens)
        self._stepper = stepper
        self._gate = gate
        self._max_tokens = max_tokens
        self._max_seqs = max_seqs
        self._step: Step | None = None
        self._num_decoding = 0
        self._running_rows: Rows = np.zeros(0, np.int64)
        """Of ``running``."""
        self._stalled: set[WorkerSequence] = set()
        """Those that lack a block for the token of the next step."""
        self._ahead: Step | None = None
        """The next step, as it was foreseen while the last one computed."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens of local prompts still to compute."""
        return sum(self._planner.remaining(seq) for seq in self.prompts)

    @property
    def planned(self) -> Step:
        assert self._step is not None, "no step was planned"
        return self._step

    def grow(self) -> list[WorkerSequence]:
        """Give running sequences a block each for their next token, the oldest first; those that
        get none stay out of the next step.

        Returns the sequences that have to go so that the others get theirs: the caller takes their
        blocks and calls ``grow`` again.
        """
        self._stalled.clear()
        if not self.running:
            return []
        sequences = self._sequences
        lacking = sequences.table.lacking_block(self._running_rows).tolist()
        if not lacking or sequences.grow(lacking):
            return []
        by_row = sequences.by_row
        waiting = sorted((by_row[row] for row in lacking), key=_age_order)
        served = waiting[: sequences.pool.num_free]
        sequences.grow([seq.row for seq in served])
        self._stalled.update(waiting[len(served) :])
        return self._victims()

    def _victims(self) -> list[WorkerSequence]:
        pool = self._sequences.pool
        seqs = sorted([*self.running, *self.prompts], key=_age_order)
        chosen = victims(
            [seq in self._stalled for seq in seqs],
            [seq.guaranteed for seq in seqs],
            lambda i: pool.num_sole(seqs[i].blocks),
            pool.num_free + pool.num_fenced_by(SWAP_FENCE),
        )
        return [seqs[i] for i in chosen]

    def stuck(self) -> WorkerSequence | None:
        """The newest sequence, if none in the batch can compute before it gets a block."""
        if not self._stalled or len(self._stalled) < len(self.running) + len(self.prompts):
            return None
        return max(self._stalled, key=_age_order)

    def plan(self, *, moves: bool = False) -> StepPlan | None:
        """The next step, which has no tokens where there are ``moves`` to make and nothing to
        compute.
        """
        ahead, self._ahead = self._ahead, None
        decoding, prompts = self.running, self.prompts
        if self._stalled:
            decoding = [seq for seq in decoding if seq not in self._stalled]
        if self._gate.shut:
            decoding = [seq for seq in decoding if not self._gate.holds(seq.state, seq.key)]
            prompts = [seq for seq in prompts if not self._gate.holds(seq.state, seq.key)]
        suspect = self._stepper.next_suspect()
        if ahead is not None and suspect is None and not prompts and decoding == ahead.seqs:
            return self._begin_ahead(ahead)
        if suspect is not None:
            decoding = [seq for seq in decoding if seq is suspect[0]]
            prompts = [seq for seq in prompts if seq is suspect[0]]
        if len(decoding) > self._max_seqs:
            decoding = decoding[: self._max_seqs]
        budget = prefill_budget(len(decoding), self._max_tokens, self._max_seqs)
        prompts, counts = self._planner.plan(prompts, *budget)
        if not (decoding or counts or moves):
            return None
        now = self._sequences.clock()
        for seq in prompts:
            seq.started_s = seq.started_s or now
        self._num_decoding = len(decoding)
        seqs = [*decoding, *prompts]
        query_lens = np.ones(len(seqs), np.int32)
        query_lens[len(decoding) :] = counts
        rows = self._running_rows if decoding is self.running else rows_of(decoding)
        rows = np.concatenate([rows, rows_of(prompts)]) if prompts else rows
        self._step = self._stepper.build(seqs, query_lens, rows)
        return self._step.plan

    def plan_ahead(self) -> StepPlan | None:
        """While a step computes, the one after it: what ``plan`` returns if its sequences go on and
        no other comes. Those that it brings to their most tokens are left out.

        The blocks that it takes are its sequences' own from now on.
        """
        self._ahead = None
        running, rows, table = self.running, self._running_rows, self._sequences.table
        is_foreseen = not (self.prompts or self._stalled or self._gate.shut or table.num_samples)
        # Sequences that have joined since stand behind those of the step.
        in_step = self.planned.rows
        if not is_foreseen or not np.array_equal(rows[: len(in_step)], in_step):
            return None
        pending = np.arange(len(rows)) < len(in_step)
        goes_on = table.length[rows] + pending < table.max_length[rows]
        if not goes_on.all():
            running = [running[i] for i in goes_on.nonzero()[0].tolist()]
            rows, pending = rows[goes_on], pending[goes_on]
        if not 0 < len(running) <= self._max_seqs:
            return None
        lacking = table.lacking_block(rows, pending).tolist()
        if lacking and not self._sequences.grow(lacking):
            return None
        self._ahead = self._stepper.build_ahead(list(running), rows, pending)
        return self._ahead.plan

    def _begin_ahead(self, ahead: Step) -> StepPlan:
        self._stepper.begin_ahead(ahead)
        self._step, self._num_decoding = ahead, len(ahead.seqs)
        return ahead.plan

    def commit(self, result: StepResult) -> tuple[StepTokens, list[FirstToken]]:
        """Local prompts whose last chunk this was leave the batch; they may come back as
        running.
        """
        step, split = self.planned, self._num_decoding
        finished = self._stepper.settle(step, result)
        tokens = _tokens(step.rows[:split], result, finished)
        firsts = first_tokens(step, result, finished, start=split)
        for first in firsts:
            self.prompts.remove(first.seq)
        return tokens, firsts

    def failed(self) -> list[WorkerSequence]:
        """The sequences to fail because the step planned last could not be run."""
        self._ahead = None
        return [seq for seq in self._stepper.failed(self.planned) if seq.state is not State.CLOSED]

    def join(self, seq: WorkerSequence) -> None:
        """Take in a sequence that computes here from the next step on."""
        if seq.state is State.PREFILLING:
            self.prompts.append(seq)
            return
        self.running.append(seq)
        self._running_rows = np.concatenate([self._running_rows, [seq.row]])

    def discard(self, seq: WorkerSequence) -> None:
        """Take a sequence that has ended out of the batch."""
        if seq.state is State.PREFILLING:
            self.prompts.remove(seq)
            return
        self.running.remove(seq)
        self._running_rows = self._running_rows[self._running_rows != seq.row]


def _tokens(rows: Rows, result: StepResult, finished: dict[int, FinishReason]) -> StepTokens:
    """The tokens of ``rows``, the first of the sampled ones, less those that are invalid."""
    num_rows = len(rows)
    valid = [i for i in range(num_rows) if i not in result.invalid] if result.invalid else None
    if valid is None:
        return StepTokens(
            rows,
            result.token_ids[:num_rows],
            {i: why for i, why in finished.items() if i < num_rows},
            {i: found for i, found in result.logprobs.items() if i < num_rows},
        )
    return StepTokens(
        rows[valid],
        result.token_ids[valid],
        {at: finished[i] for at, i in enumerate(valid) if i in finished},
        {at: result.logprobs[i] for at, i in enumerate(valid) if i in result.logprobs},
    )
