"""A runner whose steps are in flight: nothing of a step happens before somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.engine.plan import LayerDone, Runner, StepPlan, StepResult


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

    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> LateStep:
        assert not self.in_flight, "two steps at once"
        self.in_flight = True
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
