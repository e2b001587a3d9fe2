"""Steps that a device computes while the host goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.engine.plan import LayerDone, StepPlan, StepResult


class InFlight(Protocol):
    """One launched step."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> StepResult:
        """Wait for its tokens; once. Raises what the step failed of."""
        ...


@dataclass(frozen=True, slots=True)
class Settled:
    """A step whose result is known. An InFlight."""

    result: StepResult

    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self.result


class Launcher(Protocol):
    """A runner whose steps run behind the host. One step is in flight at most."""

    def launch(self, plan: StepPlan, layer_done: LayerDone | None = None) -> InFlight:
        """Begin a step. The plan's arrays are the runner's until it is done. ``layer_done`` is
        called on this thread, with events of the device, before this returns.
        """
        ...

    def prepare(self, plan: StepPlan) -> None:
        """While a step is in flight, get the next one ready but for its token ids, which are filled
        in before its launch. Another one may be launched instead.
        """
        ...
