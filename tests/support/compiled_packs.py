"""The compiled pack, built for each kind of CPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from sourcetree import ROOT

from kvferry.kernels.kv_pack.host_compiled import CompiledPack

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
_SOURCE = ROOT / "kernels" / "kv_pack" / "host_pack.c"


def build_pack(folder: Path, lanes: int) -> CompiledPack:
    """One that uses ``lanes`` at most, see ``LANES``."""
    path = folder / f"lanes{lanes}.so"
    options = ["-O2", "-std=gnu11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    options += [f"-DMOST_LANES={lanes}", "-shared", "-fPIC"]
    command = [str(COMPILER), *options, "-o", str(path), str(_SOURCE)]
    subprocess.run(command, check=True)
    return CompiledPack(path)
