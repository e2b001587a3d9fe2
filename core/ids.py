"""Identities that cross process boundaries.

A client's own request id is only ever echoed; everything inside uses the ``RequestId`` that the
router issued, unique within one router incarnation.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", int)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
LeaseId = NewType("LeaseId", int)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


class AttemptKey(NamedTuple):
    """One dispatch of one request by one router; a higher attempt makes lower ones stale."""

    router: Incarnation
    request: RequestId
    attempt: int

    def __str__(self) -> str:
        return f"{self.router:016x}/{self.request}.{self.attempt}"


def new_incarnation() -> Incarnation:
    """A random 63-bit number that tells one life of a process from the next."""
    return Incarnation(secrets.randbits(63))
