"""KV links that do not come up until they are let."""

from __future__ import annotations

import asyncio
import threading

from kvferry.core.errors import LinkLost
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.transport import Channel


class StalledConnect:
    """A Connect that hangs, as towards a host that drops packets, until ``open``."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._asked = threading.Event()

    def __call__(self, endpoint: str, timeout_s: float) -> Channel:
        self._asked.set()
        if not self._open.wait(timeout_s):
            raise LinkLost("no answer")
        return connect(endpoint, timeout_s)

    def open(self) -> None:
        self._open.set()

    async def asked(self) -> None:
        """Wait until a transfer wants a link."""
        assert await asyncio.to_thread(self._asked.wait, 20), "no transfer was begun"
