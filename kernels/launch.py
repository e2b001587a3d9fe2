"""One launch of a kernel as a value: what a wrapper decides, before anything runs.

A wrapper checks its tensors, chooses tiles for a chip, and returns a :class:`Launch`. The same
value is run on a GPU or in the interpreter, timed by the bench, or compiled ahead of time for a
chip that is not there (tensors on the ``meta`` device are enough for that), so that what is proven
about a kernel is proven about the launches that the engine makes.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from kvferry.kernels.chips import CHIPS, INTERPRETER, Chip

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels run in Triton's interpreter, by the variable that Triton itself reads when it is
imported. (This module does not import it: plans and checks are made without.)
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Launch:
    """A kernel, its grid, its run-time arguments by name and its compile-time constants."""

    kernel: Any
    """The function under ``@triton.jit``."""
    grid: tuple[int, ...]
    args: dict[str, Any]
    """Tensors, ints, floats, tensor descriptors; None for a tensor that the variant lacks."""
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def run(self) -> None:
        """Enqueue on the current stream. A grid of no programs launches nothing."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
        )


def chip_of(device: torch.device) -> Chip:
    """The chip behind a device, looked up once per device. CPU tensors: the interpreter's.

    Raises ValueError for a device that no kernel runs on.
    """
    return _chip_of(device.type, device.index)


@cache
def _chip_of(device_type: str, index: int | None) -> Chip:
    if device_type == "cpu" and INTERPRETED:
        return INTERPRETER
    if device_type != "cuda":
        raise ValueError(
            f"Triton kernels run on cuda, not on {device_type}; "
            "TRITON_INTERPRET=1 runs them in the interpreter on the CPU"
        )
    return chip_of_properties(torch.cuda.get_device_properties(index))


def chip_of_properties(facts: Any) -> Chip:
    """The chip with what torch says of a CUDA device.

    A data sheet's bandwidth and FLOP/s hold for every device of that name; slices of a chip and its
    smaller siblings have fewer multiprocessors and less cache, which the driver reports.
    """
    known = [chip for chip in CHIPS.values() if re.search(rf"\b{chip.name}\b", facts.name.upper())]
    # Neither is reported by the driver: the bench measures both before it draws a roofline.
    unknown = float("nan")
    return Chip(
        name=known[0].name if known else facts.name,
        arch=facts.major * 10 + facts.minor,
        num_sms=facts.multi_processor_count,
        shared_limit=facts.shared_memory_per_block_optin,
        bandwidth=known[0].bandwidth if known else unknown,
        matmul_flops=known[0].matmul_flops if known else unknown,
        l2_nbytes=facts.L2_cache_size,
    )


def require(condition: bool, argument: str, what: str) -> None:
    """Raise ValueError ``argument: what`` unless the condition holds."""
    if not condition:
        raise ValueError(f"{argument}: {what}")


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``; 1 for 0."""
    return 1 << max(0, n - 1).bit_length()
