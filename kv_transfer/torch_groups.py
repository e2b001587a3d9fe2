"""Process groups of two ranks, gloo and NCCL: what ``process_group`` needs of torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

FOREVER = timedelta(days=1)
"""Far beyond any deadline of a link: a wait of gloo's that times out closes the connection."""
MAX_NCCL_CTAS = 4
"""Multiprocessors that NCCL takes from the compute kernels, so channels: few."""
_HIGH_PRIORITY = -1
_ABORT = timedelta(milliseconds=1)
_ABORT_TAG = 1


class Operation(Protocol):
    """A posted send or receive."""

    def wait(self) -> None:
        """Until it is complete. Raises RuntimeError when the group broke or was aborted."""
        ...


class Group(Protocol):
    """Two ranks that send to each other; operations match in the order in which they are posted."""

    @property
    def is_device(self) -> bool: ...

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] that may be sent from and received into."""
        ...

    def send(self, slab: torch.Tensor, nbytes: int) -> Operation:
        """Post the first bytes of a slab. Raises RuntimeError."""
        ...

    def receive(self, slab: torch.Tensor, nbytes: int) -> Operation:
        """Post a receive into a slab. Raises RuntimeError."""
        ...

    def abort(self) -> None:
        """End all that is posted, on both sides. Idempotent; any thread may call it."""
        ...


class GlooGroup:
    """Over TCP, in host memory. Listens on ``host`` alone."""

    is_device = False

    def __init__(self, store: Any, rank: int, host: str, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        # Of the set-up: operations are given their own.
        options._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        self._pg = dist.ProcessGroupGloo(store, rank, 2, options)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def send(self, slab: torch.Tensor, nbytes: int) -> Operation:
        return _GlooOperation(self._pg.send([slab[:nbytes]], self._peer, 0))

    def receive(self, slab: torch.Tensor, nbytes: int) -> Operation:
        # Into the whole slab: when more comes than was asked for, gloo ends the process.
        return _GlooOperation(self._pg.recv([slab], self._peer, 0))

    def abort(self) -> None:
        # Gloo has no abort; but a wait that times out closes the connection under all others.
        try:
            self._pg.recv([self.memory(1)], self._peer, _ABORT_TAG).wait(_ABORT)
        except RuntimeError:
            return


class _GlooOperation:
    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait(FOREVER)


class NcclGroup:
    """Between two GPUs, on a high-priority stream of its own; the compute stream takes no part."""

    is_device = True

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        # Read when a group is made. A broken link is a matter of its own thread: no other one of
        # NCCL's may end the process or look into the store, which is gone by then.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
        os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = FOREVER
        options.config.min_ctas = 1
        options.config.max_ctas = MAX_NCCL_CTAS
        self._device = device
        self._peer = 1 - rank
        self._aborted = False
        self._pg = dist.ProcessGroupNCCL(store, rank, 2, options)
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        # The first operation makes the communicator: now, while the store is there.
        first = self.memory(1)
        operation = self.send(first, 1) if rank else self.receive(first, 1)
        operation.wait()

    def memory(self, nbytes: int) -> torch.Tensor:
        # What torch hands out on another stream may still be in use there.
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, slab: torch.Tensor, nbytes: int) -> Operation:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._posted(self._pg.send([slab[:nbytes]], self._peer, 0))

    def receive(self, slab: torch.Tensor, nbytes: int) -> Operation:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._posted(self._pg.recv([slab[:nbytes]], self._peer, 0))

    def abort(self) -> None:
        self._aborted = True
        self._pg.abort()

    def check(self) -> None:
        """Raises RuntimeError when the group was aborted."""
        if self._aborted:
            raise RuntimeError("the process group was aborted")

    def _posted(self, work: Any) -> Operation:
        # Makes our stream wait for NCCL's, not this thread for either.
        work.wait()
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return _NcclOperation(self, event)


class _NcclOperation:
    def __init__(self, group: NcclGroup, event: Any) -> None:
        self._group = group
        self._event = event

    def wait(self) -> None:
        # An abort ends the kernel, so that the event comes in any case.
        self._event.synchronize()
        self._group.check()


def why_not_gloo() -> str | None:
    """Why this process has no gloo; None when it has."""
    return None if dist.is_available() and dist.is_gloo_available() else "torch has no gloo"


def why_not_nccl() -> str | None:
    """Why this process has no NCCL; None when it has."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None if dist.is_nccl_available() else "torch has no NCCL"
