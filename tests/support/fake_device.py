"""A device whose streams run late, and in any order that events do not forbid."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class FakeEvent:
    """A point in a fake stream."""

    device: FakeDevice
    passed: bool = False

    def synchronize(self) -> None:
        self.device.run_until(self)


Task = Callable[[], None] | FakeEvent
"""Work; or, in a stream's queue, an event that is passed there."""


@dataclass(eq=False)
class FakeStream:
    """A queue of tasks."""

    device: FakeDevice
    tasks: deque[tuple[str, Task]] = field(default_factory=deque)

    def memory(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._append("work", work)

    def wait_for(self, event: FakeEvent) -> None:
        self._append("wait", event)

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device)
        self._append("record", event)
        return event

    def _append(self, kind: str, task: Task) -> None:
        with self.device.lock:
            self.tasks.append((kind, task))

    def can_step(self) -> bool:
        if not self.tasks:
            return False
        kind, task = self.tasks[0]
        return kind != "wait" or (isinstance(task, FakeEvent) and task.passed)

    def step(self) -> None:
        kind, task = self.tasks.popleft()
        if isinstance(task, FakeEvent):
            task.passed |= kind == "record"
        else:
            task()


@dataclass(eq=False)
class FakeDevice:
    """Makes streams; nothing in them runs before some thread waits for an event."""

    rng: random.Random
    streams: list[FakeStream] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    latest_first: bool = True
    """Run the newest stream for as long as it goes: the other ones are late."""

    def stream(self) -> FakeStream:
        with self.lock:
            self.streams.append(FakeStream(self))
            return self.streams[-1]

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def run_until(self, event: FakeEvent) -> None:
        with self.lock:
            while not event.passed:
                ready = [stream for stream in self.streams if stream.can_step()]
                assert ready, "every stream waits for an event that nobody records"
                (ready[-1] if self.latest_first else self.rng.choice(ready)).step()
