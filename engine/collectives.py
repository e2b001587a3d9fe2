"""What tensor-parallel ranks do together, over torch.distributed: gloo on CPUs, NCCL on GPUs.

Sums are made in the order of the ranks, from all ranks' addends: the result is the same on every
rank and does not depend on the shape of the batch, as a ring's would. On GPUs, where that costs
bandwidth, it is done only where determinism is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kvferry.core.errors import RankLost

T = TypeVar("T")
_ABORT = timedelta(milliseconds=1)
_ABORT_TAG = 1 << 20


class TorchCollectives:
    """``models.parallel.Collectives`` over one process group of this worker's ranks alone.

    Everything raises RankLost when the group broke.
    """

    def __init__(self, group: Any, rank: int, size: int, *, in_rank_order: bool = True) -> None:
        """``group``: a torch.distributed ProcessGroup. ``in_rank_order``: how sums are made."""
        self._is_gloo = isinstance(group, dist.ProcessGroupGloo)
        self.rank = rank
        self.size = size
        self._group = group
        self._in_rank_order = in_rank_order
        self._scratch: Tensor | None = None

    def sum(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x
        x = x.contiguous()
        if not self._in_rank_order or self.size <= 2:
            _checked(lambda: self._group.allreduce([x]).wait())  # of two, any order is the same
            return x
        first, second, *others = self._all(x)
        torch.add(first, second, out=x)
        for part in others:
            x += part
        return x

    def gather(self, x: Tensor, widths: list[int]) -> Tensor:
        """All parts travel as wide as the widest: the libraries know no others."""
        rows, widest = len(x), max(widths)
        padded = x.new_zeros(rows, widest)
        padded[:, : x.shape[1]] = x
        parts = self._all(padded) if x.is_cuda else self._to_first(padded)
        if self.rank:
            return x[:, :0]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def abort(self) -> None:
        """End what is under way, on all ranks. Any thread may call it; idempotent."""
        if not self._is_gloo:
            self._group.abort()
            return
        for peer in set(range(self.size)) - {self.rank}:
            # Gloo has no abort; but a wait that times out closes the connection under all others.
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(_ABORT)

    def _all(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x``; valid until the next call."""
        needed = self.size * x.numel()
        if (
            self._scratch is None
            or self._scratch.numel() < needed
            or self._scratch.dtype != x.dtype
        ):
            self._scratch = x.new_empty(needed)
        parts = list(self._scratch[:needed].view(self.size, *x.shape).unbind())
        _checked(lambda: self._group.allgather([parts], [x]).wait())
        return parts

    def _room(self, like: Tensor, count: int) -> Tensor:
        """Memory for ``count`` elements, the same one as long as it suffices."""
        scratch = self._scratch
        if scratch is None or scratch.dtype != like.dtype or scratch.numel() < count:
            scratch = self._scratch = like.new_empty(count)
        return scratch[:count]

    def _to_first(self, x: Tensor) -> list[Tensor]:
        """Every rank's ``x`` on rank 0, nothing elsewhere."""
        parts = [] if self.rank else [torch.empty_like(x) for _ in range(self.size)]
        options = dist.GatherOptions()
        options.rootRank = 0
        _checked(lambda: self._group.gather([parts] if parts else [], [x], options).wait())
        return parts


def collectives(
    store: dist.Store, rank: int, size: int, timeout_s: float, device: str, deterministic: bool
) -> TorchCollectives:
    """The ranks of a worker, wherever it computes. Raises RankLost."""
    if device == "cpu":
        return gloo_collectives(store, rank, size, timeout_s)
    return nccl_collectives(store, rank, size, timeout_s, in_rank_order=deterministic)


def gloo_collectives(
    store: dist.Store, rank: int, size: int, timeout_s: float, host: str = "127.0.0.1"
) -> TorchCollectives:
    """Ranks on CPUs. Listens on ``host`` alone, for the other ranks and while the group is made.

    ``timeout_s``: of the set-up, and of each operation: a rank that is silent for so long is lost.
    Raises RankLost.
    """
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    group = _checked(lambda: dist.ProcessGroupGloo(store, rank, size, options))
    return TorchCollectives(group, rank, size)


def nccl_collectives(
    store: dist.Store, rank: int, size: int, timeout_s: float, *, in_rank_order: bool
) -> TorchCollectives:
    """Ranks on GPUs of one host. Raises RankLost."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    group = _checked(lambda: dist.ProcessGroupNCCL(store, rank, size, options))
    return TorchCollectives(group, rank, size, in_rank_order=in_rank_order)


def _checked(operation: Callable[[], T]) -> T:
    try:
        return operation()
    except RuntimeError as error:
        raise RankLost(f"the ranks of this worker lost each other: {error}") from error
