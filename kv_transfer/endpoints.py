"""Endpoints: the transport that each scheme names."""

from __future__ import annotations

from typing import Literal

from kvferry.core.errors import LinkRefused
from kvferry.kv_transfer import loopback, shm
from kvferry.kv_transfer.transport import Channel, Listener

TransportName = Literal["auto", "loopback", "shm"]


def listen(transport: TransportName) -> Listener:
    """Listen on a fresh endpoint of a transport; ``auto`` is shm."""
    return loopback.LoopbackListener() if transport == "loopback" else shm.ShmListener()


def connect(endpoint: str, timeout_s: float) -> Channel:
    """Open a link to ``scheme:name``. Raises LinkRefused, LinkLost."""
    match endpoint.partition(":")[0]:
        case shm.SCHEME:
            return shm.connect_shm(endpoint, timeout_s)
        case loopback.SCHEME:
            return loopback.connect_loopback(endpoint, timeout_s)
    raise LinkRefused(f"{endpoint!r} names no transport; known: {shm.SCHEME}, {loopback.SCHEME}")
