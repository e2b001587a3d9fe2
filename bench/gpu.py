"""Everything that only a GPU can prove, step by step, in at most eight minutes.

Runs in process on a bare host: no Ray, no gRPC. A step that the device or the host cannot do is
named with the reason, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import kvferry.bench
from kvferry.bench import kernels
from kvferry.bench.cuda_timer import require_cuda
from kvferry.bench.engine_check import check_all
from kvferry.bench.graph_check import check_graphs
from kvferry.bench.memory_check import check_memory
from kvferry.bench.options import finished, run_options
from kvferry.bench.report import Better, Claim, Report, Scalar
from kvferry.core.errors import StartupError

TOTAL_S = 470.0
KERNELS_S = 220.0
GPU_MARK = "pytest.mark.gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a step found. Raise StartupError for what cannot be done at all."""

    rows: Sequence[dict[str, Scalar]] = ()
    claims: Sequence[Claim] = ()
    facts: dict[str, Scalar] = field(default_factory=dict)
    """Options and measured limits, which stand beside those of the whole run."""


@dataclass(frozen=True, slots=True)
class Step:
    """A named part; ``run`` gets the seconds that it may take."""

    name: str
    limit_s: float
    run: Callable[[float], Found]


def kernels_step(limit_s: float) -> Found:
    """Every kernel checked and timed: `kvferry bench kernels --device cuda`."""
    report = kernels.run(["--device", "cuda", "--budget", str(limit_s)])
    facts = {name: value for name, value in report.options.items() if name != "device"}
    return Found(rows=[dict(row) for row in report.rows], claims=report.claims, facts=facts)


def tests_step(limit_s: float) -> Found:
    """The tests marked gpu, in a process in which Triton compiles."""
    root = Path(kvferry.bench.__path__[0]).resolve().parent
    # Only files with such tests: others import what a bare host lacks.
    files = [path for path in sorted(root.glob("tests/**/test_*.py")) if _has_gpu_tests(path)]
    if not files:
        raise StartupError(f"there are no tests in {root}: not a checkout")
    for needed in ("pytest", "hypothesis"):
        if importlib.util.find_spec(needed) is None:
            raise StartupError(f"{needed} is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        outcome = Path(scratch) / "outcome.xml"
        # A bare host lacks the plug-ins that pyproject.toml configures.
        command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q"]
        command += ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]
        command += ["-p", "no:cacheprovider", f"--junitxml={outcome}", *map(str, files)]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        try:
            subprocess.run(command, cwd=root, env=environment, timeout=limit_s, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            raise StartupError(f"not done after {limit_s:.0f} s") from None
        if not outcome.exists():
            raise StartupError("pytest wrote no results; its output says why")
        return read_outcome(outcome.read_text(encoding="utf-8"))


def _has_gpu_tests(path: Path) -> bool:
    return GPU_MARK in path.read_text(encoding="utf-8")


def read_outcome(xml: str) -> Found:
    """A row per test that did not pass, and one claim. Raises StartupError when none could run."""
    cases = list(ElementTree.fromstring(xml).iter("testcase"))
    rows: list[dict[str, Scalar]] = []
    counts = {"passed": 0, "skipped": 0, "failed": 0}
    for case in cases:
        name = f"{case.get('classname', '')}.{case.get('name', '')}"
        troubles = [*case.iter("failure"), *case.iter("error")]
        skips = list(case.iter("skipped"))
        kind = "failed" if troubles else "skipped" if skips else "passed"
        counts[kind] += 1
        for trouble in (*troubles, *skips):
            message = (trouble.get("message") or "").partition("\n")[0][:200]
            rows.append({"test": name, "outcome": kind, "notes": message})
    if counts["passed"] + counts["failed"] == 0:
        reason = str(rows[0]["notes"]) if rows else "there are none"
        raise StartupError(f"no test ran: {reason}")
    claim = Claim(
        id="gpu.tests_failed",
        value=counts["failed"],
        better=Better.LOWER,
        goal=0,
        n=counts["passed"] + counts["failed"],
    )
    return Found(rows=rows, claims=[claim])


def kv_step(limit_s: float) -> Found:
    """KV caches on the device, cuda_ipc, NCCL and a push beside the computation."""
    require_cuda()
    # A process of its own: others import what a bare host may lack.
    for needed in ("msgspec", "xxhash"):
        if importlib.util.find_spec(needed) is None:
            raise StartupError(f"{needed} is not installed")
    command = [sys.executable, "-P", "-m", "kvferry.bench.kv_device"]
    # What has begun when the budget is used up still ends.
    command += ["--budget", str(limit_s / 2)]
    try:
        done = subprocess.run(command, timeout=limit_s, stdout=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        raise StartupError(f"not done after {limit_s:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"it ended with status {done.returncode}; its output says why")
    return read_report(done.stdout)


def read_report(text: str) -> Found:
    """Rows and claims of a report in JSON, as ``Report.to_json`` has it."""
    report = json.loads(text)
    claims = []
    for fields in report["claims"]:
        del fields["met"]
        claims.append(Claim(**{**fields, "better": Better(fields["better"])}))
    return Found(rows=report["rows"], claims=claims)


def engine_step(limit_s: float) -> Found:
    """A model in steps of all kinds, its logits against the same weights on the CPU."""
    rows, claim = check_all(require_cuda())
    return Found(rows=rows, claims=[claim])


def graphs_step(limit_s: float) -> Found:
    """Decode steps as CUDA graphs, equal to eager ones and timed beside them."""
    rows, claims = check_graphs(require_cuda(), budget_s=limit_s)
    return Found(rows=rows, claims=claims)


def memory_step(limit_s: float) -> Found:
    """A profiled step on the device, and a cache that fills what it leaves."""
    rows, claims = check_memory(require_cuda())
    return Found(rows=rows, claims=claims)


STEPS = (
    Step("kernels", KERNELS_S, kernels_step),
    Step("engine", 60.0, engine_step),
    Step("graphs", 60.0, graphs_step),
    Step("memory", 30.0, memory_step),
    Step("kv", 120.0, kv_step),
    Step("tests", 240.0, tests_step),
)


def run_steps(
    steps: Sequence[Step], clock: Callable[[], float], options: dict[str, Scalar]
) -> Report:
    """All in order; each step's summary stands before its rows."""
    deadline = clock() + TOTAL_S
    rows: list[dict[str, Scalar]] = []
    claims: list[Claim] = []
    done, failed = 0, 0
    for step in steps:
        started = clock()
        found = Found()
        try:
            left = deadline - started
            if left <= 0:
                raise StartupError("no time is left")
            found, outcome = step.run(min(step.limit_s, left)), "done"
            done += 1
        except StartupError as error:
            outcome = f"cannot: {error}"
        # One step that breaks must not cost the results of the others.
        except Exception as error:
            outcome = f"failed: {type(error).__name__}: {str(error)[:300]}"
            failed += 1
        rows.append({"step": step.name, "outcome": outcome, "seconds": round(clock() - started, 1)})
        rows += [{"step": step.name, **row} for row in found.rows]
        claims += found.claims
        options = {**options, **{f"{step.name}.{k}": v for k, v in found.facts.items()}}
    claims += [
        Claim(id="gpu.steps_done", value=done, better=Better.HIGHER, goal=1, n=len(steps)),
        Claim(id="gpu.steps_failed", value=failed, better=Better.LOWER, goal=0, n=len(steps)),
    ]
    return Report(bench="gpu", rows=rows, claims=claims, options=finished(options))


def run(args: list[str]) -> Report:
    """Takes no options beside ``--help``."""
    parser = argparse.ArgumentParser(
        prog="kvferry bench gpu", description=__doc__.partition("\n")[0]
    )
    plain = run_options(parser.parse_args(args))
    return run_steps(STEPS, time.monotonic, plain)
