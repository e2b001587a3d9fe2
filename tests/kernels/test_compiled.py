"""Every kernel keeps the rules of compiled code on sm_80, sm_90 and sm_100.

That each rule can fail is shown in tests/bench/test_kernel_rules.py, on what
tests/kernels/test_aot.py finds in launches that break it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.bench.kernel_cases.registry import chosen_cases
from kvferry.bench.kernel_compile import compiling_environment

PROGRAM = "from kvferry.cli.main import main; main()"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of `kvferry bench kernels --compile-only --ci`, in a process that does not interpret."""
    target = tmp_path_factory.mktemp("compiled") / "kernels.json"
    command = [sys.executable, "-P", "-c", PROGRAM, "bench", "kernels", "--compile-only", "--ci"]
    done = subprocess.run(
        [*command, "--json", target],
        env=compiling_environment(os.environ),
        capture_output=True,
        text=True,
    )
    assert target.exists(), done.stderr
    found: dict[str, Any] = json.loads(target.read_text())
    assert done.returncode == (0 if all(claim["met"] for claim in found["claims"]) else 1)
    return found


@pytest.mark.slow
def test_no_rule_is_broken(report: dict[str, Any]) -> None:
    broken = [
        f"{row['kernel']}: {row['case']} on {row['arch']}: {row['verdict']}"
        for row in report["rows"]
        if row["verdict"] != "ok"
    ]
    assert broken == []
    (claim,) = report["claims"]
    assert (claim["id"], claim["value"], claim["met"]) == ("kernels.compile_violations", 0, True)


@pytest.mark.slow
def test_every_kernel_was_compiled_for_every_generation(report: dict[str, Any]) -> None:
    seen = {(row["kernel"], row["case"], row["arch"]) for row in report["rows"]}
    assert seen == {
        (case.kernel, case.name, arch)
        for case in chosen_cases(ci_only=True)
        for arch in ("sm_80", "sm_90", "sm_100")
    }


@pytest.mark.slow
def test_what_code_needs_was_read_from_it(report: dict[str, Any]) -> None:
    assert all(0 < row["registers"] <= 255 for row in report["rows"])
    assert any("wgmma" in row["matrix"] for row in report["rows"] if row["arch"] == "sm_90")


def test_the_caches_are_outside_the_project() -> None:
    assert not (Path(__file__).parents[2] / ".triton").exists()
