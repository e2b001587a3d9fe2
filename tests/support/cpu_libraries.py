"""The CPU's operations, built as an installation builds them, with warnings as errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

from compiled_packs import COMPILER
from sourcetree import ROOT

_SOURCES = [str(ROOT / "kernels" / "cpu" / name) for name in ("cpu_ops.c", "elements.c")]


def build_cpu_ops(folder: Path, *options: str) -> Path:
    """The library, compiled with further ``options``."""
    path = folder / "cpu_ops.so"
    flags = ["-O3", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", *options]
    command = [str(COMPILER), *flags, "-shared", "-fPIC", "-pthread", "-o", str(path), *_SOURCES]
    subprocess.run(command, check=True)
    return path
