"""Peers of the transfer bench, each a program of its own: see ``transfer_peer``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvferry.bench import transfer_peer
from kvferry.bench.transfer_cache import block_order
from kvferry.bench.transfer_pair import SOURCE_ORDER, TARGET_ORDER, Batch, Setting
from kvferry.core.errors import StartupError

TIMEOUT_S = 180.0
TRIES = 2
"""Of each way, to find the fastest."""
MOST_TRIED = 64 << 20
"""Bytes: above, what was the fastest of the largest size tried is taken."""
WAYS = (0, 2 << 20, 16 << 20)
"""Bytes of slabs; 0: a descriptor per row and block."""


class PeerProgram:
    """A running peer that holds the same blocks as our caches do.

    It stands still between its turns: the threads of peers spin, which slows down everybody else.
    """

    def __init__(self, process: subprocess.Popen[str], words: IO[str], setting: Setting) -> None:
        self._process = process
        self._words = words
        self._setting = setting
        self._ways: dict[int, int] = {}
        """Blocks -> the fastest way."""
        self.name = str(self._ask(geometry(setting))["name"])

    def transfer(self, tokens: int, count: int) -> Batch:
        """Make ``count`` transfers of ``tokens`` each, in the way that is fastest for so many."""
        blocks = tokens // self._setting.source.block_size
        if blocks not in self._ways and self._setting.nbytes(tokens) > MOST_TRIED and self._ways:
            self._ways[blocks] = self._ways[max(self._ways)]
        if blocks not in self._ways:
            tried = {way: self._measure(blocks, TRIES, way) for way in WAYS}
            self._ways[blocks] = min(tried, key=lambda way: min(tried[way].latencies_s))
        return self._measure(blocks, count, self._ways[blocks])

    def way(self, tokens: int) -> str:
        slab_bytes = self._ways.get(tokens // self._setting.source.block_size, 0)
        return f"slabs of {slab_bytes >> 20} MiB" if slab_bytes else "runs"

    def _measure(self, blocks: int, count: int, slab_bytes: int) -> Batch:
        found = self._ask({"blocks": blocks, "count": count, "slab_bytes": slab_bytes})
        latencies = found["latencies_s"]
        return Batch(latencies, sum(latencies), found["cpu_s"])

    def _ask(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Raises StartupError with its last words when it dies, or does not answer in time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.start()
        try:
            os.killpg(self._process.pid, signal.SIGCONT)
            self._process.stdin.write(f"{json.dumps(wanted)}\n")
            self._process.stdin.flush()
            while line := self._process.stdout.readline():
                if line.startswith(transfer_peer.MARK):
                    found: dict[str, Any] = json.loads(line.removeprefix(transfer_peer.MARK))
                    os.killpg(self._process.pid, signal.SIGSTOP)
                    return found
        except (BrokenPipeError, ProcessLookupError):
            pass
        finally:
            watch.cancel()
        self._words.seek(0)
        words = self._words.read().strip().splitlines() or ["it said nothing"]
        raise StartupError(f"a peer of the transfer bench ended: {words[-1]}")


def geometry(setting: Setting) -> dict[str, Any]:
    """Our caches as the peer's script is told of them. Raises ValueError for a re-layout."""
    layout = setting.source
    if (layout, layout.dtype) != (setting.target, setting.wire):
        raise ValueError("peers move blocks as they are")
    num_blocks = -(-setting.tokens // layout.block_size)
    return {
        "rows": 2 * layout.num_layers,
        "run_bytes": layout.block_size * layout.layer_token_bytes // 2,
        "source": block_order(num_blocks, SOURCE_ORDER),
        "target": block_order(num_blocks, TARGET_ORDER),
    }


@contextmanager
def peer_program(
    command: Sequence[str], setting: Setting, environment: Mapping[str, str] | None = None
) -> Iterator[PeerProgram]:
    """Start ``PYTHON transfer_peer.py NAME``; leaving ends it. Raises StartupError."""
    with tempfile.TemporaryFile("w+") as words:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env=os.environ | dict(environment or {}),
                # One to stop; should we die meanwhile, the system ends it.
                process_group=0,
            )
        except OSError as error:
            raise StartupError(f"{command[0]} could not be run: {error}") from None
        try:
            yield PeerProgram(process, words, setting)
        finally:
            _end(process)


def peer_command(python: str, name: str) -> list[str]:
    return [python, str(Path(transfer_peer.__file__)), name]


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        os.killpg(process.pid, signal.SIGCONT)
        process.stdin.close()
        process.wait(10.0)
    except (BrokenPipeError, ProcessLookupError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
    process.stdout.close()
