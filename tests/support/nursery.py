"""Real worker processes for tests that kill or stop them: forked, so that each starts at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("nursery_process.py")
TIMEOUT_S = 60.0


@dataclass(slots=True, eq=False)
class Child:
    """One worker process."""

    name: str
    pid: int = 0
    address: str = ""
    listening: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def release(self) -> None:
        """Let the requests that it holds go on."""
        os.kill(self.pid, signal.SIGUSR1)

    def memfds(self) -> list[str]:
        """Slab memory that it has open."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if "memfd:" in target:
                found.append(target)
        return found


class Nursery:
    """Starts workers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._children: dict[str, Child] = {}

    async def start(self, role: str, name: str, config: dict[str, Any], hold: str = "") -> Child:
        """A worker that listens, and holds requests in the state ``hold``."""
        child = self._children[name] = Child(name)
        spec = {"role": role, "name": name, "hold": hold, "config": config}
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(spec) + "\n").encode())
        async with asyncio.timeout(TIMEOUT_S):
            await child.listening.wait()
        return child

    async def listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            child = self._children[said["name"]]
            if "held" in said:
                child.held.set()
            else:
                child.pid, child.address = said["pid"], said["address"]
                child.listening.set()


@asynccontextmanager
async def nursery() -> AsyncIterator[Nursery]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    made = Nursery(process)
    listening = asyncio.create_task(made.listen())
    try:
        yield made
    finally:
        # Stopped children would not see their parent die.
        assert process.stdin is not None
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        process.stdin.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
