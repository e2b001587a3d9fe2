"""Compile the launches of cases for chips that need not be there, in several processes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from kvferry.bench.kernel_cases.case import Case
from kvferry.kernels.aot import Compiled, identity
from kvferry.kernels.chips import Chip
from kvferry.kernels.launch import Launch


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no compiled code."""

    reason: str


Outcome = Compiled | Failure


@dataclass(frozen=True, slots=True)
class Job:
    """Names of what to compile; a process builds the launch from them by itself."""

    kernel: str
    case: str
    launch: int
    """Index in the launches of the case."""
    chip: Chip

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """One launch of a case on a chip, and what became of it."""

    case: Case
    chip: Chip
    index: int
    launch: Launch | None
    """None when the case could not make its launches."""
    outcome: Outcome


class Compiler(Protocol):
    """Compiles one job at a time."""

    def compile(self, job: Job) -> Outcome: ...

    def close(self) -> None: ...


class CompilerProcess:
    """A process of ``kernel_worker``, begun with the first job and again after a death."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = command or (sys.executable, "-P", "-m", "kvferry.bench.kernel_worker")
        self._process: subprocess.Popen[str] | None = None

    def compile(self, job: Job) -> Outcome:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=compiling_environment(os.environ),
            )
        answer = self._ask(self._process, json.dumps(job.to_json()))
        if not answer:
            code = self._end()
            return Failure(f"the compiling process ended with exit code {code}")
        found = json.loads(answer)
        return Failure(found["error"]) if "error" in found else Compiled(**found["compiled"])

    def close(self) -> None:
        if self._process is not None:
            self._end()

    def _ask(self, process: subprocess.Popen[str], line: str) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def _end(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        try:
            process.communicate(timeout=10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            process.kill()
            process.communicate()
        return process.returncode


def compiling_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same, for a process in which Triton compiles."""
    return {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}


def compile_cases(
    cases: Sequence[Case],
    chips: Sequence[Chip],
    *,
    processes: int,
    start: Callable[[], Compiler] = CompilerProcess,
    in_time: Callable[[], bool] = lambda: True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Built]:
    """All launches of all cases for each chip; equal ones are compiled once.

    ``in_time`` is asked before each job; once it is false, the rest fails as out of time.
    """
    found = [built for chip in chips for case in cases for built in _launches(case, chip)]
    jobs: dict[tuple[Chip, str], Job] = {}
    for built in found:
        if built.launch is not None:
            job = Job(built.case.kernel, built.case.name, built.index, built.chip)
            jobs.setdefault((built.chip, identity(built.launch)), job)
    outcomes = dict(
        zip(
            jobs,
            _compile_all(list(jobs.values()), processes, start, in_time, progress),
            strict=True,
        )
    )
    return [
        built
        if built.launch is None
        else Built(
            built.case,
            built.chip,
            built.index,
            built.launch,
            outcomes[built.chip, identity(built.launch)],
        )
        for built in found
    ]


def _launches(case: Case, chip: Chip) -> Iterator[Built]:
    try:
        work = case.make(torch.device("meta"), chip)
    except (ValueError, RuntimeError, TypeError) as error:
        yield Built(case, chip, 0, None, Failure(f"makes no launch: {error}"))
        return
    for index, launch in enumerate(work.launches):
        yield Built(case, chip, index, launch, Failure("not compiled"))


def _compile_all(
    jobs: Sequence[Job],
    processes: int,
    start: Callable[[], Compiler],
    in_time: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> list[Outcome]:
    """Outcomes in the order of the jobs; each of the processes takes the next when it is free."""
    outcomes: list[Outcome] = [Failure("out of time")] * len(jobs)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(jobs)):
        waiting.put(index)

    def work_off() -> None:
        compiler = start()
        try:
            while in_time():
                index = waiting.get_nowait()
                outcomes[index] = compiler.compile(jobs[index])
                progress(len(jobs) - waiting.qsize(), len(jobs))
        except queue.Empty:
            return
        finally:
            compiler.close()

    count = max(1, min(processes, len(jobs)))
    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(work_off) for _ in range(count)]:
            done.result()
    return outcomes
