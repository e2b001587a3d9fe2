"""Regenerate the stubs beside the .proto files: ``python proto/generate.py [OUTPUT_FOLDER]``.

protoc writes below the virtual folder kvferry/proto so that the stubs import each other by their
real names; the files are then moved to OUTPUT_FOLDER (default: this folder).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def generate(output: Path) -> list[Path]:
    """Write all stubs into ``output`` and return their paths."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-Ikvferry/proto={HERE}"]
        command += [
            f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
        ]
        command += [f"kvferry/proto/{source.name}" for source in sorted(HERE.glob("*.proto"))]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path}, capture_output=True)
        written = sorted(Path(scratch, "kvferry", "proto").iterdir())
        return [Path(shutil.copy(file, output / file.name)) for file in written]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for stub in generate(target):
        print(stub.name)
