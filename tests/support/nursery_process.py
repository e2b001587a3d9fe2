"""A process that imports everything once and forks a worker for each line of its standard input.

    {"role": "prefill", "name": "prefill-0", "hold": "transferring", "config": {...}}

Lines on its standard output: {"name", "pid", "address"} when a worker listens, {"name", "held"}
when a request is held in the state to hold it in. SIGUSR1 lets a worker's requests go on. All
workers die with this process, which dies at the end of its input.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

import torch
from local_system import SECRET, fake_backend

from kvferry.core.config import parse_config
from kvferry.core.ids import AttemptKey
from kvferry.decode_worker.worker import DecodeWorker
from kvferry.kv_transfer.endpoints import connect
from kvferry.prefill_worker.worker import PrefillWorker

PR_SET_PDEATHSIG = 1
IN_FLIGHT = "transferring"
"""Held with a slab packed and not yet pushed, after one that was."""


class SpeakingGate:
    """Holds every request in one state until SIGUSR1, and says so once."""

    def __init__(self, name: str, state: str) -> None:
        self._name, self._state = name, state
        self._open = threading.Event()
        self._said = False
        self.shut = bool(state)

    def holds(self, state: str, key: AttemptKey) -> bool:
        if state != self._state or self._open.is_set():
            return False
        self._say()
        return True

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        """Hold this thread."""
        if not self._open.is_set():
            self._say()
            self._open.wait()

    def _say(self) -> None:
        if not self._said:
            self._said = True
            say(name=self._name, held=self._state)

    def preempts(self, key: AttemptKey, computed: int, length: int) -> None:
        return None


class HoldingChannel:
    """A sender's link that stops at its second push."""

    def __init__(self, inner: Any, gate: SpeakingGate) -> None:
        self._inner, self._gate = inner, gate
        self.transport = inner.transport
        self.send, self.receive, self.wake = inner.send, inner.receive, inner.wake
        self.open_inlet, self.close = inner.open_inlet, inner.close

    def open_outlet(self, *arguments: Any) -> HoldingOutlet:
        return HoldingOutlet(self._inner.open_outlet(*arguments), self._gate)


class HoldingOutlet:
    def __init__(self, inner: Any, gate: SpeakingGate) -> None:
        self._inner, self._gate = inner, gate
        self._pushes = 0
        self.is_pulled, self.is_device = inner.is_pulled, inner.is_device
        self.slab, self.in_flight, self.close = inner.slab, inner.in_flight, inner.close

    is_followed = False
    """What is held may not be seen either."""

    def progress(self, slab: int, grant: int, nbytes: int) -> None: ...

    def push(self, *arguments: Any) -> None:
        self._pushes += 1
        if self._pushes > 1:
            self._gate.wait()
        self._inner.push(*arguments)


def say(**values: object) -> None:
    os.write(1, (json.dumps(values) + "\n").encode())


async def serve(spec: dict[str, Any]) -> None:
    config = parse_config(spec["config"])
    gate = SpeakingGate(spec["name"], spec["hold"])
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, gate.open)
    if spec["role"] == "prefill":
        backend = fake_backend(config.prefill.block_size)

        def connect_and_hold(endpoint: str, timeout_s: float) -> Any:
            channel = connect(endpoint, timeout_s)
            return HoldingChannel(channel, gate) if spec["hold"] == IN_FLIGHT else channel

        worker: Any = PrefillWorker(
            spec["name"], config, backend, SECRET, gate=gate, connect=connect_and_hold
        )
    else:
        backend = fake_backend(config.decode.block_size)
        worker = DecodeWorker(spec["name"], config, backend, SECRET, gate=gate)
    say(name=spec["name"], pid=os.getpid(), address=await worker.start())
    await worker.ended()


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            sys.stdin.close()
            asyncio.run(serve(json.loads(line)))
            os._exit(0)


if __name__ == "__main__":
    main()
