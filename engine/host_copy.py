"""Results of a step on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Passed(Protocol):
    """An event of a device."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True, eq=False)
class HostCopy:
    """Tensors of the host, whose contents are there once ``after`` has passed; None: they are."""

    tensors: tuple[torch.Tensor, ...]
    after: Passed | None = None

    def done(self) -> bool:
        return self.after is None or self.after.query()

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self.after is not None:
            self.after.synchronize()
        return self.tensors


def to_host(tensors: Sequence[torch.Tensor]) -> HostCopy:
    """Copy behind what their device still has to do, without waiting for it. On the CPU they are
    what they are.
    """
    if tensors[0].device.type == "cpu":
        return HostCopy(tuple(tensors))
    # Pinned memory comes from a cache that hands none out before the copy into it is done.
    copies = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensors[0].device))
    return HostCopy(copies, event)
