"""What the step loop exchanges with the rest of its process, as small Protocols and events.

Each has a fake: tests inject ports that collect, clocks that are set by hand, gates that stay shut.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.proto import worker_pb2 as pb


class RouterPort(Protocol):
    """The way back to one router. Sending never blocks; once the router is gone it does nothing."""

    @property
    def incarnation(self) -> Incarnation:
        """Of the router at the other end."""
        ...

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for this router. Called on the step loop's thread."""
        ...


class Relief(StrEnum):
    """How a sequence gives up its blocks."""

    SWAP = "swap"
    """To host memory, from where it goes on."""
    GIVE_BACK = "give back"
    """To its router, which sends it out again."""


class Gate(Protocol):
    """Lets a test hold a request in a state and act while it is there, or take its blocks."""

    @property
    def shut(self) -> bool:
        """Whether it can hold anything at all."""
        ...

    def holds(self, state: str, key: AttemptKey) -> bool:
        """True while the request must stay in ``state``."""
        ...

    def preempts(self, key: AttemptKey, computed: int, length: int) -> Relief | None:
        """Whether the request, which has ``length`` tokens by now and KV of the first ``computed``,
        must give up its blocks before the next step, as if they had run out.
        """
        ...


class OpenGate:
    """The gate of a real system."""

    shut = False

    def holds(self, state: str, key: AttemptKey) -> bool:
        return False

    def preempts(self, key: AttemptKey, computed: int, length: int) -> Relief | None:
        return None


@dataclass(frozen=True, slots=True)
class SessionOpened:
    port: RouterPort


@dataclass(frozen=True, slots=True)
class SessionClosed:
    port: RouterPort


@dataclass(frozen=True, slots=True)
class FromRouter:
    port: RouterPort
    message: pb.RouterMessage


def key_message(key: AttemptKey) -> pb.Key:
    return pb.Key(request=key.request, attempt=key.attempt)


def send_failed(port: RouterPort, key: AttemptKey, kind: str, message: str) -> None:
    """Tell a router that an attempt is over on this worker, and why."""
    failed = pb.Failed(key=key_message(key), message=message, kind=kind)
    port.send(pb.WorkerMessage(failed=failed))
