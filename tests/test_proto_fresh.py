"""The checked-in stubs are what protoc makes of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sourcetree import ROOT


def test_stubs_are_fresh(tmp_path: Path) -> None:
    generator = ROOT / "proto" / "generate.py"
    subprocess.run([sys.executable, str(generator), str(tmp_path)], check=True, capture_output=True)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "proto").glob("*_pb2*.py*")}
    assert sorted(fresh) == sorted(kept), "run make proto"
    assert [name for name in fresh if fresh[name] != kept[name]] == [], "run make proto"
