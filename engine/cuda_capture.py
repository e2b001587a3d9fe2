"""Capture of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class CudaGraph:
    """One graph, and where its result lies."""

    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def replay(self) -> None:
        self.graph.replay()


class CudaCapture:
    """``graphs.Capture`` on one device; all graphs share a memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Callable[[], torch.Tensor]) -> CudaGraph:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        # Kernels are compiled and libraries set up here: neither may happen in a capture.
        with torch.cuda.stream(self._stream):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        current.wait_stream(self._stream)
        return CudaGraph(graph, output)
