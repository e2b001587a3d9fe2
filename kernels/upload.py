"""Numbers of the host on the device of a step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def uploaded(array: NDArray[np.generic], device: torch.device | str) -> torch.Tensor:
    """On a GPU a copy behind what its stream still has to do, for which the host does not wait: a
    copy from pageable memory would hold the host until the step's kernels before it are done.
    On the CPU the tensor shares the array's memory.
    """
    host = torch.from_numpy(array)
    kind = torch.device(device).type
    if kind == "cpu":
        return host
    return (host.pin_memory() if kind == "cuda" else host).to(device, non_blocking=kind == "cuda")
