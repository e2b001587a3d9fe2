"""Graphs without a GPU: a replay runs the function again, on whatever its static tensors hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class FakeGraph:
    """One captured function; ``output`` stays where it is, as a graph's does."""

    run: Callable[[], torch.Tensor]
    output: torch.Tensor
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        result = self.run()
        assert result.shape == self.output.shape, "a graph's shapes are those of its capture"
        self.output.copy_(result)


@dataclass(eq=False)
class FakeCapture:
    """A Capture that keeps all it made, in order."""

    graphs: list[FakeGraph] = field(default_factory=list)

    def __call__(self, run: Callable[[], torch.Tensor]) -> FakeGraph:
        self.graphs.append(FakeGraph(run, run().clone()))
        return self.graphs[-1]

    @property
    def replays(self) -> list[int]:
        return [graph.replays for graph in self.graphs]
