"""An agent of NIXL with the memory that it moves, and the thread that turns it.

NIXL's own progress thread spins. Ours turns the agent only while something can move.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import mmap
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.core.errors import LinkRefused

_MIN_PAUSE_S = 20e-6
_MAX_PAUSE_S = 20e-3
_PATIENCE = 16
"""Between two turns passes this part of the time that nothing has moved for."""


def why_not() -> str | None:
    """Why this process cannot use NIXL; None when it can."""
    if importlib.util.find_spec("nixl_cu12") is None:
        return "NIXL is not installed: pip install 'kvferry[rdma]'"
    return None


def load_nixl() -> Any:
    """NIXL's Python API. Raises LinkRefused."""
    # NIXL brings a libnl of its own, and the system's RDMA libraries bring the system's. Loaded
    # into one scope the two mix up their lists, and the process crashes as it exits; loaded first,
    # by itself, the system's keeps to itself.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libnl-route-3.so.200")
    try:
        from nixl_cu12 import _api
    except ImportError as error:
        raise LinkRefused(f"NIXL cannot be loaded: {error}") from None
    # It would print a line for each agent.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


class NixlAgent:
    """A NIXL agent with one registered memory, cut into slabs. Its lock guards all calls."""

    def __init__(self, num_slabs: int, slab_bytes: int, loopback: bool) -> None:
        """``loopback``: UCX listens on no other interface. Raises LinkRefused."""
        api = load_nixl()
        self.name = secrets.token_hex(16)
        self.lock = threading.Lock()
        self.slab_bytes = slab_bytes
        nbytes = num_slabs * slab_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self.map = mmap.mmap(-1, nbytes, flags=flags)
        self.bytes = memoryview(self.map)
        self.address = int(np.frombuffer(self.map, np.uint8).ctypes.data)
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self.nixl = api.nixl_agent(self.name, config)
            self.nixl.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"} if loopback else {})
            self._registered = self.nixl.register_memory([(self.address, nbytes, 0, "")], "DRAM")
        except Exception as error:  # NIXL's errors have no base of their own.
            raise LinkRefused(f"NIXL cannot start: {error}") from None

    def slab(self, index: int) -> memoryview:
        return self.bytes[index * self.slab_bytes : (index + 1) * self.slab_bytes]

    def close(self) -> None:
        """Once it returns, the agent touches the memory no more."""
        with self.lock:
            self.nixl.deregister_memory(self._registered)
            del self.nixl


class Turner:
    """A thread that calls ``turn`` again while that returns True, and rests until stirred."""

    def __init__(self, turn: Callable[[], bool], name: str) -> None:
        self._turn = turn
        self._changed = threading.Condition()
        self._stirred = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def stir(self) -> None:
        """There is something to turn for."""
        with self._changed:
            self._stirred = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        pause_s: float | None = None
        since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stirred or self._closing, pause_s)
                if self._closing:
                    return
                if self._stirred:
                    self._stirred = False
                    since = time.monotonic()
            pause_s = None
            if self._turn():
                still_s = time.monotonic() - since
                pause_s = min(_MAX_PAUSE_S, max(_MIN_PAUSE_S, still_s / _PATIENCE))
