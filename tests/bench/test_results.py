"""The pages of docs/ show what docs/results holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sourcetree import ROOT

PAGES = {name: ROOT / "docs" / name for name in ("benchmarks.md", "transfer.md")}
RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))
CLAIM_KEYS = {"id", "value", "goal", "better", "n", "spread", "unit", "met"}


def report(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def bench_of(path: Path) -> str:
    """Of BENCH.json and BENCH-KIND.json."""
    return path.stem.partition("-")[0]


def test_the_results_are_fresh(tmp_path: Path) -> None:
    script = ROOT / "docs" / "benchmark_tables.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    for name, page in PAGES.items():
        assert (tmp_path / name).read_text() == page.read_text(), "run make docs"


def test_the_roofline_is_fresh(tmp_path: Path) -> None:
    fresh = tmp_path / "kernels.md"
    subprocess.run([sys.executable, ROOT / "docs" / "kernel_tables.py", fresh], check=True)
    assert fresh.read_text() == (ROOT / "docs" / "kernels.md").read_text(), "run make docs"


def test_every_kernel_is_described() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/kernel.py")}
    assert {folder for folder in folders if f"\n### {folder}\n" not in page} == set()


def test_there_is_a_result_of_every_bench() -> None:
    assert {bench_of(path) for path in RESULTS} == {
        "burst",
        "engine",
        "kv_quality",
        "limits",
        "memory",
        "pd",
        "transfer",
    }


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_is_a_whole_report_of_its_bench(path: Path) -> None:
    found = report(path)
    assert found["bench"] == bench_of(path)
    assert set(found) == {"bench", "commit", "machine", "options", "rows", "claims"}
    assert all(set(claim) == CLAIM_KEYS for claim in found["claims"])
    assert found["options"]["quick"] is False
    pages = "".join(page.read_text() for page in PAGES.values())
    for claim in found["claims"]:
        assert f"| `{claim['id']}` |" in pages


def test_promised_claims_are_there() -> None:
    ids = {claim["id"] for path in RESULTS for claim in report(path)["claims"]}
    promised = {"loop_ms_256", "pd_ttft_ratio", "handoff_gap_share", "weights_private_share"}
    assert promised | {"burst_p99_itl_ratio"} <= ids


def test_ratios_come_from_twenty_pairs_at_least() -> None:
    (pd,) = (report(path) for path in RESULTS if path.stem == "pd")
    assert all(claim["n"] >= 20 for claim in pd["claims"])
