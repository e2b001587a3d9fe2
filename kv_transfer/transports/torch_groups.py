"""Process groups of two ranks, gloo and NCCL: what ``process_group`` needs of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kvferry.kv_transfer.device_stream import CudaStream, Event, Stream

FOREVER = timedelta(days=1)
"""Far beyond any deadline of a link: a wait of gloo's that times out closes the connection."""
MAX_NCCL_CTAS = 4
"""Multiprocessors that NCCL takes from the compute kernels, so channels: few."""
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
    """Between two GPUs. ``stream``: a high-priority one of its own; the compute stream takes no
    part.
    """

    is_device = True

    def __init__(self, pg: Any, rank: int, stream: Stream) -> None:
        self._pg = pg
        self._peer = 1 - rank
        self._stream = stream
        self._is_aborted = False

    def memory(self, nbytes: int) -> torch.Tensor:
        return self._stream.memory(nbytes)

    def send(self, slab: torch.Tensor, nbytes: int) -> Operation:
        return self._post(lambda: self._pg.send([slab[:nbytes]], self._peer, 0))

    def receive(self, slab: torch.Tensor, nbytes: int) -> Operation:
        return self._post(lambda: self._pg.recv([slab[:nbytes]], self._peer, 0))

    def abort(self) -> None:
        if not self._is_aborted:
            self._is_aborted = True
            self._pg.abort()

    def check(self) -> None:
        """Raises RuntimeError when the group was aborted."""
        if self._is_aborted:
            raise RuntimeError("the process group was aborted")

    def _post(self, post: Callable[[], Any]) -> Operation:
        # This wait is our stream's, for NCCL's; this thread waits for neither.
        self._stream.enqueue(lambda: post().wait())
        return _NcclOperation(self, self._stream.record())


class _NcclOperation:
    def __init__(self, group: NcclGroup, event: Event) -> None:
        self._group = group
        self._event = event

    def wait(self) -> None:
        # An abort ends the kernel, so that the event comes in any case.
        self._event.synchronize()
        self._group.check()


def nccl_group(store: Any, rank: int, device: torch.device) -> NcclGroup:
    """The communicator of a rank pair, ready. Blocks until the peer has come to the same point."""
    # Read when a group is made. A broken link is a matter of its own thread: none of NCCL's may end
    # the process, or look into the store, which is gone by then.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = FOREVER
    options.config.min_ctas = 1
    options.config.max_ctas = MAX_NCCL_CTAS
    pg = dist.ProcessGroupNCCL(store, rank, 2, options)
    group = NcclGroup(pg, rank, CudaStream(device))
    # The first operation makes the communicator: now, while the store is there.
    first = group.memory(1)
    operation = group.send(first, 1) if rank else group.receive(first, 1)
    operation.wait()
    return group


def why_not_gloo() -> str | None:
    """Why this process has no gloo; None when it has."""
    return None if dist.is_available() and dist.is_gloo_available() else "torch has no gloo"


def why_not_nccl() -> str | None:
    """Why this process has no NCCL; None when it has."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    return None if dist.is_nccl_available() else "torch has no NCCL"
