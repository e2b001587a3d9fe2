"""How much memory a KV cache may take: what is stated, or what a step leaves of the device.

    fraction of the device's memory            what this rank may fill, all in all
    - what is in use after a profiled step     weights, the runtime's own, other processes
    - what the step took beyond that           activations, logits, workspaces
    = the KV cache

The step is the largest that the pool allows. CUDA graphs and fragments live in what the fraction
leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvferry.core.errors import ConfigError
from kvferry.core.units import format_bytes


class DeviceMemory(Protocol):
    """The memory of one device as its runtime counts it, in bytes."""

    def settle(self) -> None:
        """Finish all work, give back what is kept for reuse, and forget the peak."""
        ...

    def allocated(self) -> int:
        """By this process now."""
        ...

    def peak_allocated(self) -> int:
        """By this process at most, since ``settle``."""
        ...

    def free_and_total(self) -> tuple[int, int]:
        """Of the whole device, whoever uses it."""
        ...


class CudaMemory:
    """DeviceMemory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def peak_allocated(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device))

    def free_and_total(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return free, total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """Bytes of one device, after a step was run."""

    total: int
    free: int
    """With the weights loaded and the step's memory given back."""
    step: int
    """What the step took while it ran."""


def profile_step(memory: DeviceMemory, run: Callable[[], int]) -> MemoryProfile:
    """Run a step and see what it takes. ``run`` holds on to nothing, and returns the bytes of the
    cache that it used, which are not the step's.
    """
    memory.settle()
    before = memory.allocated()
    cache = run()
    step = memory.peak_allocated() - before - cache
    memory.settle()
    free, total = memory.free_and_total()
    return MemoryProfile(total=total, free=free, step=step)


def kv_budget(*, total: int, free: int, step: int, fraction: float) -> int:
    """Bytes for the KV cache; not above 0 where there is no room for any."""
    return int(total * fraction) - (total - free) - step


@dataclass(frozen=True, slots=True)
class KvBudget:
    """What the KV cache of a rank may take, and who says so."""

    nbytes: int
    key: str
    """Of the configuration: what to change where it is too little."""
    origin: str
    """The arithmetic, for people."""
    is_stated: bool

    def advice(self, needed_nbytes: int) -> str:
        """What to do where the cache needs so much."""
        if self.is_stated:
            return f"set it to {needed_nbytes}, or lower model.max_model_len"
        return (
            f"that takes {format_bytes(needed_nbytes)}; lower model.max_model_len or "
            "max_batch_tokens, choose a narrower kv_dtype, or free memory on the device"
        )


def stated_budget(nbytes: int, pool_name: str) -> KvBudget:
    return KvBudget(nbytes, f"{pool_name}.kv_memory", format_bytes(nbytes), is_stated=True)


def no_step_fits(pool_name: str, error: Exception) -> ConfigError:
    """For a device that runs out of memory in the profiled step itself."""
    reason = str(error).partition("\n")[0][:300]
    return ConfigError(
        f"{pool_name}.max_batch_tokens",
        f"the largest step and one sequence do not fit on the device: {reason}: lower it, "
        f"{pool_name}.max_batch_seqs or model.max_model_len",
    )


def measured_budget(profile: MemoryProfile, fraction: float, pool_name: str) -> KvBudget:
    total, free, step = profile.total, profile.free, profile.step
    nbytes = kv_budget(total=total, free=free, step=step, fraction=fraction)
    origin = (
        f"{fraction:.0%} of {format_bytes(total)}, less {format_bytes(total - free)} in use and "
        f"{format_bytes(step)} for a step, is {format_bytes(max(nbytes, 0))}, which"
    )
    return KvBudget(max(nbytes, 0), f"{pool_name}.gpu_memory", origin, is_stated=False)
