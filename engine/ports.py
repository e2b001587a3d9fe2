"""What the step loop exchanges with the rest of its process, as small Protocols and events.

Each has a fake: tests inject ports that collect, clocks that are set by hand, gates that stay shut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvferry.core.ids import AttemptKey, Incarnation
from kvferry.proto import worker_pb2 as pb


class RouterPort(Protocol):
    """The way back to one router. Sending never blocks; a port whose router is gone swallows what it is given."""

    @property
    def incarnation(self) -> Incarnation:
        """Of the router at the other end."""
        ...

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for this router. Called on the step loop's thread."""
        ...


class Gate(Protocol):
    """Lets a test hold a request in a state and act while it is there."""

    def holds(self, state: str, key: AttemptKey) -> bool:
        """True while the request must stay in ``state``."""
        ...


class OpenGate:
    """The gate of a real system: never shut."""

    def holds(self, state: str, key: AttemptKey) -> bool:
        return False


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
