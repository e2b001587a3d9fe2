"""Times calls on a CUDA device: each round a graph, replayed between two events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvferry.bench.kernel_device import Bench
from kvferry.bench.kernel_timing import Call, Round
from kvferry.core.errors import StartupError
from kvferry.kernels.launch import INTERPRETED, chip_of


class CudaTimer:
    """On the current device. Calls that a graph cannot hold raise RuntimeError."""

    def prepare(self, calls: Sequence[Call]) -> Round:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # What is compiled or allocated at the first call must not be while capturing.
            for call in calls:
                call()
            _refuse_waiting(calls[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()

        def a_round(repeats: int) -> float:
            started = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            started.record()
            for _ in range(repeats):
                graph.replay()
            ended.record()
            ended.synchronize()
            return float(started.elapsed_time(ended)) / 1e3 / repeats

        return a_round


def _refuse_waiting(call: Call) -> None:
    """Raise RuntimeError where a call waits for the device, which a capture must not.

    Before one begins: a capture that fails leaves torch's generator and allocator in capture mode,
    and with them every case that follows.
    """
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def require_cuda() -> torch.device:
    """The current CUDA device. Raises StartupError where kernels cannot run on one."""
    if not torch.cuda.is_available():
        raise StartupError(f"torch {torch.__version__} finds no CUDA device")
    if INTERPRETED:
        raise StartupError("TRITON_INTERPRET is set: kernels would run on the CPU; unset it")
    return torch.device("cuda", torch.cuda.current_device())


def cuda_bench(seed: int, clock: Callable[[], float]) -> Bench:
    """The current CUDA device, ready to run cases. Raises StartupError where there is none."""
    device = require_cuda()
    torch.manual_seed(seed)
    return Bench(device=device, chip=chip_of(device), timer=CudaTimer(), clock=clock)
