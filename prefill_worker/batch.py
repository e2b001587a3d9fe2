"""The prompts that a prefill worker computes, a chunk of each per step."""

from __future__ import annotations

from kvferry.engine.first_token import FirstToken, first_tokens
from kvferry.engine.plan import StepPlan, StepResult
from kvferry.engine.ports import Gate
from kvferry.engine.prompt_order import Wait
from kvferry.engine.prompts import PromptPlanner
from kvferry.engine.sequences import Sequences, State, WorkerSequence
from kvferry.engine.steps import Step, Stepper
from kvferry.prefill_worker.scheduler import tokens_before


class PrefillBatch:
    """WAITING and PREFILLING sequences, in order of arrival."""

    def __init__(
        self, sequences: Sequences, stepper: Stepper, gate: Gate, max_tokens: int, max_seqs: int
    ) -> None:
        self.prompts: list[WorkerSequence] = []
        self._sequences = sequences
        self._planner = PromptPlanner(sequences, max_tokens)
        self._stepper = stepper
        self._gate = gate
        self._max_tokens = max_tokens
        self._max_seqs = max_seqs
        self._step: Step | None = None

    @property
    def waiting_tokens(self) -> int:
        """Tokens still to compute."""
        return sum(self._planner.remaining(seq) for seq in self.prompts)

    def tokens_before(self, remaining: int, time_left_s: float) -> int:
        """Tokens to compute before a prompt of so many that would come in now."""
        waits = map(self._planner.wait, self.prompts)
        return tokens_before(Wait(remaining, time_left_s), waits, self._planner.patience)

    def plan(self) -> StepPlan | None:
        prompts = self.prompts
        if self._gate.shut:
            prompts = [seq for seq in prompts if not self._gate.holds(seq.state, seq.key)]
        suspect = self._stepper.next_suspect()
        if suspect is not None:
            planned, counts = [suspect[0]], [suspect[1]]
        else:
            planned, counts = self._planner.plan(prompts, self._max_tokens, self._max_seqs)
        if not planned:
            return None
        now = self._sequences.clock()
        for seq in planned:
            if seq.state is State.WAITING:
                seq.enter(State.PREFILLING)
                seq.started_s = now
        self._step = self._stepper.build(planned, counts)
        return self._step.plan

    def commit(self, result: StepResult) -> list[FirstToken]:
        """The prompts whose last chunk this was leave the batch."""
        step = self.planned
        finished = self._stepper.settle(step, result)
        done = first_tokens(step, result, finished)
        for first in done:
            self.prompts.remove(first.seq)
        return done

    def failed(self) -> list[WorkerSequence]:
        """The sequences to fail because the step planned last could not be run."""
        return self._stepper.failed(self.planned)

    @property
    def planned(self) -> Step:
        assert self._step is not None, "no step was planned"
        return self._step
