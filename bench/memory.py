"""Memory of the weights when several workers of one host load the same model.

Each process maps the weight files and reads every weight. While all of them hold the model, the
kernel tells which resident pages of those mappings each process shares with others and which it has
to itself, and how much memory of its own each process took to load.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, option_parser, run_options
from kvferry.bench.report import Better, Claim, Report, Scalar
from kvferry.bench.weights import load_and_touch
from kvferry.core.errors import StartupError
from kvferry.models.packed import packed_file
from kvferry.models.weight_files import weight_files

GOAL_PRIVATE_SHARE = 0.01
PROCESSES = 2
LOAD_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Pages:
    """Resident bytes of some mappings of one process."""

    shared: int
    private: int
    anonymous: int
    """The part of both that no file backs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One process that holds the model."""

    weights: Pages
    """Of the mapped weight files."""
    grown: int
    """Anonymous bytes that loading and reading all weights added."""


def parse_smaps(text: str, files: Iterable[str] | None = None) -> Pages:
    """Sums over the mappings of ``files``, or over all: the text of Linux's ``/proc/PID/smaps``."""
    wanted = None if files is None else set(files)
    counted = False
    sums = dict.fromkeys(("Shared", "Private", "Anonymous"), 0)
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if not value.endswith(" kB") or " " in name:
            # The head of a mapping: addresses, rights, offset, device, inode, path.
            if "-" in name.split(" ")[0]:
                path = line.split(maxsplit=5)[5:]
                counted = wanted is None or (bool(path) and path[0] in wanted)
        elif counted and (kind := name.partition("_")[0]) in sums and name != "Private_Hugetlb":
            sums[kind] += int(value.split()[0]) * 1024
    return Pages(sums["Shared"], sums["Private"], sums["Anonymous"])


def run(args: list[str]) -> Report:
    parser = option_parser("memory", __doc__.partition("\n")[0])
    add_model(parser)
    options = parser.parse_args(args)
    plain = run_options(options)
    folder = prepared(options.model)
    files = mapped_files(folder)
    total = sum(path.stat().st_size for path in files)
    found = measure(folder, [str(path.resolve()) for path in files])
    rows = [_row(number, memory, total) for number, memory in enumerate(found)]
    share = max(memory.weights.private for memory in found) / total
    claim = Claim(
        id="weights_private_share",
        value=share,
        better=Better.LOWER,
        goal=GOAL_PRIVATE_SHARE,
        n=len(found),
    )
    return Report(bench="memory", rows=rows, claims=[claim], options=finished(plain))


def mapped_files(folder: Path) -> list[Path]:
    """What loading maps of a folder: its weights, and their panels where there are any."""
    panels = packed_file(folder)
    return [*weight_files(folder), *([panels] if panels.is_file() else [])]


def measure(folder: Path, files: Sequence[str]) -> list[ProcessMemory]:
    """Load in all processes, then look at each. Raises StartupError."""
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        holders = []
        for _ in range(PROCESSES):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_hold, args=(str(folder), theirs))
            process.start()
            theirs.close()
            stack.callback(_end, process, ours)
            holders.append((process, ours))
        before = [_answer(pipe) for _, pipe in holders]
        after = [_answer(pipe) for _, pipe in holders]
        return [
            ProcessMemory(weights=parse_smaps(_smaps(process.pid), files), grown=later - earlier)
            for (process, _), earlier, later in zip(holders, before, after, strict=True)
        ]


def _hold(folder: str, pipe: Connection) -> None:
    """The process: say how much anonymous memory there is before and after, then stay."""
    pipe.send_bytes(str(parse_smaps(_smaps("self")).anonymous).encode())
    decoder = load_and_touch(Path(folder))
    pipe.send_bytes(str(parse_smaps(_smaps("self")).anonymous).encode())
    try:
        pipe.recv_bytes()
    except EOFError:
        del decoder


def _answer(pipe: Connection) -> int:
    try:
        if pipe.poll(LOAD_TIMEOUT_S):
            return int(pipe.recv_bytes())
    except EOFError:
        raise StartupError("a process died while loading the model") from None
    raise StartupError(f"a process did not load the model in {LOAD_TIMEOUT_S:.0f} s")


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join()


def _smaps(pid: int | str | None) -> str:
    return Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")


def _row(number: int, memory: ProcessMemory, total: int) -> dict[str, Scalar]:
    return {
        "process": number,
        "weight bytes": total,
        "shared bytes": memory.weights.shared,
        "private bytes": memory.weights.private,
        "anonymous growth": memory.grown,
    }
