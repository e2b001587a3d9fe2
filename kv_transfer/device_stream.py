"""What the KV plane needs of a device: streams beside the one that computes, and pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

HIGH_PRIORITY = -1


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Make this thread wait until the stream has come there."""
        ...


class Stream(Protocol):
    """Work in order. What two streams do is in no order but that of events."""

    def memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device, for this stream's work alone. (What torch hands out on
        another stream may still be in use there.)
        """
        ...

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run the launches and copies that ``work`` makes once all before them are done."""
        ...

    def wait_for(self, event: Any) -> None:
        """Let the stream, not this thread, wait for a point in another one."""
        ...

    def record(self) -> Event:
        """The point behind all that is enqueued now."""
        ...


class DeviceRuntime(Protocol):
    """Makes streams and pinned memory."""

    def stream(self) -> Stream: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of host memory that a device copies to and from by itself."""
        ...


class CudaStream:
    """A stream whose work goes before that of the compute stream where both could run."""

    def __init__(self, device: torch.device, priority: int = HIGH_PRIORITY) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=priority)

    def memory(self, nbytes: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def enqueue(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()

    def wait_for(self, event: Any) -> None:
        self._stream.wait_event(event)

    def record(self) -> Event:
        # Blocking: the thread that waits sleeps, rather than keep a core busy.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event


class CudaRuntime:
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
