"""A runner whose steps are in flight: nothing of a step happens before somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np

from kvferry.engine.plan import LayerDone, Runner, StepPlan, StepResult
from kvferry.engine.step_tensors import StepArrays


class LateRunner:
    """A Launcher. What a step reads and writes it reads and writes as late as possible, so that
    whatever is taken from it meanwhile is missed.
    """

    def __init__(
        self,
        runner: Runner,
        meanwhile: Callable[[StepPlan], None] = lambda plan: None,
        polls: int = 10**9,
    ) -> None:
        """``meanwhile`` is called once a step is launched; after ``polls`` questions it is done."""
        self.runner = runner
        self.meanwhile = meanwhile
        self.polls = polls
        self.in_flight = False
        self.prepared: tuple[StepPlan, StepPlan] | None = None
        """The last one, and as it was then."""
        self.launched_ahead: list[bool] = []
        """Of each step, whether it was prepared."""

    def prepare(self, plan: StepPlan) -> None:
        assert self.in_flight, "nothing to get ahead of"
        self.prepared = plan, deepcopy(plan)

    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> LateStep:
        assert not self.in_flight, "two steps at once"
        self.in_flight = True
        is_ahead = self.prepared is not None and self.prepared[0] is plan
        self.launched_ahead.append(is_ahead)
        if is_ahead:
            _check_unchanged(*self.prepared)
        self.prepared = None
        step = LateStep(self, plan, layer_done)
        self.meanwhile(plan)
        return step


class LateStep:
    """One step in flight."""

    def __init__(self, owner: LateRunner, plan: StepPlan, layer_done: LayerDone | None) -> None:
        self._owner = owner
        self._plan = plan
        self._layer_done = layer_done
        self._polls = owner.polls

    def done(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def wait(self) -> StepResult:
        assert self._owner.in_flight, "waited for twice"
        self._owner.in_flight = False
        return self._owner.runner.execute(self._plan, self._layer_done)


def _check_unchanged(plan: StepPlan, prepared: StepPlan) -> None:
    """But for token ids, which the step before yields."""
    now, then = (StepArrays.of(step, block_size=4) for step in (plan, prepared))
    for name in ("positions", "slots", "sampled_tokens", "query_starts", "context_lens"):
        assert np.array_equal(getattr(now, name), getattr(then, name)), name
    assert np.array_equal(plan.block_tables, prepared.block_tables)
