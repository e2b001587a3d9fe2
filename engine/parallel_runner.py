"""Steps of a tensor-parallel worker, from its rank 0."""

from __future__ import annotations

from kvferry.core.errors import RankLost
from kvferry.engine.plan import LayerDone, Runner, StepPlan, StepResult
from kvferry.engine.rank_group import RankGroup
from kvferry.engine.rank_messages import step_message


class ParallelRunner:
    """Broadcasts each plan and runs rank 0's part, which gathers the logits and samples."""

    def __init__(self, part: Runner, group: RankGroup) -> None:
        self._part = part
        self._group = group

    def execute(self, plan: StepPlan, layer_done: LayerDone | None = None) -> StepResult:
        """Raises RankLost for whatever goes wrong: the other ranks are in the middle of a step that
        this one has left, so that none can go on.
        """
        self._group.send(step_message(plan))
        try:
            return self._part.execute(plan, layer_done)
        except Exception as error:
            why = self._group.why_lost or f"rank 0: step {plan.step} failed: {error}"
            raise RankLost(why) from error
