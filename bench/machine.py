"""What a measurement was made on: machine, software, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("torch", "ray", "grpcio", "numpy", "transformers", "triton")


def machine_facts() -> dict[str, str | int]:
    """Facts that a reader needs to judge a number, ready for JSON. Loads no library."""
    facts: dict[str, str | int] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in LIBRARIES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    if gpus := _gpus():
        facts["gpus"] = gpus
    return facts


def commit() -> str:
    """The commit measured, marked when the tree has changes; ``unknown`` outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    head = _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if changed else head


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _gpus() -> str:
    names = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return "; ".join(names.splitlines())


def _output(*command: str) -> str:
    """What a command prints, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
