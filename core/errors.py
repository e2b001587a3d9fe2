"""Every error kvferry raises, as one tree.

    KvferryError
    ├── InvalidRequest      the request is wrong; names the field     400 / INVALID_ARGUMENT
    │   └── UnknownModel    the model is not served here              404 / NOT_FOUND
    ├── RequestEnded        the request was stopped from outside
    │   ├── Cancelled       by its client                             499 / CANCELLED
    │   └── DeadlineExceeded  by its own deadline                     504 / DEADLINE_EXCEEDED
    ├── Unavailable         nothing can serve it now, later maybe     503 / UNAVAILABLE
    │   ├── Overloaded      queues are full                           429 / RESOURCE_EXHAUSTED
    │   └── AttemptFailed   one attempt failed; the router may dispatch another
    │       ├── WorkerLost  the session to a worker ended
    │       ├── WorkerBusy  the worker has no room for it just now
    │       ├── Preempted   the decode worker gave the sequence back for lack of blocks
    │       └── TransferFailed  KV did not arrive whole and verified
    │           └── LinkLost  the link to the peer broke; a new one may carry on
    │               └── LinkRefused  the peer is gone or refuses; trying again is useless
    ├── StartupError        the system cannot start; says what to do
    │   ├── ConfigError     a configuration value is wrong; names the key
    │   └── ModelLoadError  a checkpoint is incomplete or unsupported; names the file or tensor
    ├── RankLost            a rank of a tensor-parallel worker is gone, and the worker with it
    └── ProtocolError       a peer sent something that the protocol does not allow

Foreign errors (gRPC, Ray, sockets) are mapped onto this tree at the edge that meets them.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Root of the tree."""


class InvalidRequest(KvferryError):
    """The request is wrong. ``field`` is a path as the client wrote it: ``messages[1].content``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)  # as args, so that it survives the way between processes
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class UnknownModel(InvalidRequest):
    """The model asked for is not served here."""


class RequestEnded(KvferryError):
    """The request was stopped from outside."""


class Cancelled(RequestEnded):
    """The client went away or asked to stop."""


class DeadlineExceeded(RequestEnded):
    """The request's own deadline passed."""


class Unavailable(KvferryError):
    """Nothing can serve the request now; a later try may succeed."""


class Overloaded(Unavailable):
    """Queues are full."""


class AttemptFailed(Unavailable):
    """One dispatch of a request failed; the router may dispatch it again."""


class WorkerLost(AttemptFailed):
    """The session to a worker ended."""


class WorkerBusy(AttemptFailed):
    """The worker has no room for the request just now."""


class Preempted(AttemptFailed):
    """The decode worker gave the sequence back because its blocks ran out."""


class TransferFailed(AttemptFailed):
    """The KV of a prompt did not arrive whole and verified."""


class LinkLost(TransferFailed):
    """The link to a peer of the KV plane broke. Its transfers may go on over a new one."""


class LinkRefused(LinkLost):
    """The peer is gone or will not have us; connecting again does not help."""


class StartupError(KvferryError):
    """The system cannot start. The message says what to do."""


class ConfigError(StartupError):
    """A configuration value is wrong. ``key`` is its dotted path in the configuration file."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)  # as args, so that it survives the way between processes
        self.key = key
        self.message = message

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


class ModelLoadError(StartupError):
    """A checkpoint is incomplete, damaged or of an unsupported kind."""


class RankLost(KvferryError):
    """A rank of a tensor-parallel worker is gone or out of step: the worker cannot go on."""


class ProtocolError(KvferryError):
    """A peer sent something that the protocol does not allow."""
