"""A table of transports that only have names, for tests of the choice among them."""

from __future__ import annotations

from typing import Any

from kvferry.core.ids import Incarnation
from kvferry.kv_transfer.endpoints import Medium, Transport

PEER = Incarnation(5)
ENDPOINTS = ("slow:1", "fast:1", "open:1", "absent:1", "new:1")


def unused(*_: Any) -> Any:
    raise AssertionError("a choice opens nothing")


def transport(name: str, why_not: str | None = None, authenticates: bool = True) -> Transport:
    medium = Medium.MEMORY if name == "fast" else Medium.NETWORK
    return Transport(name, medium, unused, unused, lambda: why_not, authenticates)


TRANSPORTS = {
    each.name: each
    for each in (
        transport("fast"),
        transport("slow"),
        transport("open", authenticates=False),
        transport("absent", "no device"),
    )
}
