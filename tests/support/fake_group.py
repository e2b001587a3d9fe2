"""Two process groups that behave as NCCL's do at their worst: whatever does not match, hangs."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class FakeOperation:
    """A send or receive that ends when the wire says so."""

    rank: int
    is_send: bool
    slab: torch.Tensor
    nbytes: int
    wire: FakeWire
    is_done: bool = False

    def wait(self) -> None:
        with self.wire.changed:
            self.wire.changed.wait_for(lambda: self.is_done or self.wire.is_aborted)
            if not self.is_done:
                raise RuntimeError("aborted")


@dataclass
class FakeWire:
    """What two groups share. The n-th post of one rank meets the n-th of the other; both must fit,
    and no rank may have more than ``limit`` posts open. Else nothing moves ever again.
    """

    limit: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    posts: tuple[list[FakeOperation], list[FakeOperation]] = field(default_factory=lambda: ([], []))
    done: int = 0
    most_open: int = 0
    is_hung: bool = False
    is_aborted: bool = False

    def post(self, operation: FakeOperation) -> FakeOperation:
        with self.changed:
            if self.is_aborted:
                raise RuntimeError("aborted")
            self.posts[operation.rank].append(operation)
            self.most_open = max(self.most_open, len(self.posts[operation.rank]) - self.done)
            self.changed.notify_all()
        return operation

    @property
    def can_move(self) -> bool:
        return min(len(posts) for posts in self.posts) > self.done

    def move(self) -> bool:
        """Complete the next pair, if it is there and fits."""
        with self.changed:
            self.is_hung |= self.most_open > self.limit
            if self.is_hung or not self.can_move:
                return False
            first, second = (posts[self.done] for posts in self.posts)
            if first.is_send == second.is_send or first.nbytes != second.nbytes:
                self.is_hung = True
                return False
            source, target = (first, second) if first.is_send else (second, first)
            target.slab[: target.nbytes] = source.slab[: source.nbytes]
            first.is_done = second.is_done = True
            self.done += 1
            self.changed.notify_all()
            return True


@dataclass
class FakeGroup:
    """One rank's end of a wire."""

    wire: FakeWire
    rank: int
    is_device: bool = False

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def send(self, slab: torch.Tensor, nbytes: int) -> FakeOperation:
        return self.wire.post(FakeOperation(self.rank, True, slab, nbytes, self.wire))

    def receive(self, slab: torch.Tensor, nbytes: int) -> FakeOperation:
        return self.wire.post(FakeOperation(self.rank, False, slab, nbytes, self.wire))

    def abort(self) -> None:
        with self.wire.changed:
            self.wire.is_aborted = True
            self.wire.changed.notify_all()
