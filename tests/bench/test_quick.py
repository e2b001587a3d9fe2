"""Every bench runs from its command line to its JSON, at sizes that measure nothing."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tiny_models import save, tiny_model
from tiny_tokenizer import save_tokenizer

from kvferry.bench import burst, engine, limits, memory, pd
from kvferry.bench.engine_claims import GOALS_LOOP_MS, GOALS_VS_BEST
from kvferry.bench.report import Report
from kvferry.bench.throughput import PREFILL, Sizes
from kvferry.cli.bench import benches


def checked(report: Report, tmp_path: Path) -> dict[str, float]:
    """Claim -> value, after the report was written and read back."""
    report.write(tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["rows"]
    assert {"load_average_before", "load_average_after", "threads"} <= set(written["options"])
    return {claim["id"]: claim["value"] for claim in written["claims"]}


def test_the_command_lists_all() -> None:
    assert {"burst", "engine", "limits", "memory", "pd", "transfer"} <= set(benches())


def test_limits(tmp_path: Path) -> None:
    assert checked(limits.run(["--quick", "--threads", "1"]), tmp_path) == {}


def test_engine(tiny_folder: Path, tmp_path: Path) -> None:
    report = engine.run(["--quick", "--threads", "1", "--model", str(tiny_folder)])
    claims = checked(report, tmp_path)
    assert set(claims) == {
        "prefill_tokens_per_s_12",
        "decode_tokens_per_s_b1",
        "decode_tokens_per_s_b2",
        "prefill_vs_best",
        "decode_b1_vs_best",
        "decode_b2_vs_best",
        "prefill_share_of_peak",
        "decode_attention_share",
        "loop_ms_4",
        "loop_gap_ms_4",
        "hit_ms_4096",
    }
    # transformers alone is not the best of all peers.
    assert [c.goal for c in report.claims if c.id == "prefill_vs_best"] == [None]
    assert min(claims.values()) > 0
    names = {str(row["engine"]) for row in report.rows}
    assert any(name.startswith("transformers") for name in names)


def test_the_full_run_claims_what_was_promised() -> None:
    assert {loop.running for loop in engine.loop_sizes(quick=False)} == set(GOALS_LOOP_MS)
    assert set(GOALS_VS_BEST) == {PREFILL, *Sizes().batches}


@pytest.mark.cluster
def test_pd(tiny_folder: Path, tmp_path: Path) -> None:
    report = pd.run(["--quick", "--threads", "1", "--model", str(tiny_folder)])
    assert set(checked(report, tmp_path)) == {"pd_ttft_ratio", "handoff_gap_share"}
    ours, colocated = report.rows
    assert ours["transfer bytes"]
    assert not colocated["transfer bytes"]


@pytest.mark.cluster
def test_burst(tmp_path: Path) -> None:
    # Its decoding sequences have to outlast any burst.
    folder = save(tiny_model("llama", torch.float32, max_position_embeddings=8192), tmp_path / "m")
    plot = tmp_path / "burst.svg"
    report = burst.run(["--quick", "--model", str(save_tokenizer(folder)), "--plot", str(plot)])
    assert set(checked(report, tmp_path)) == {
        "burst_p99_itl_ratio",
        "burst_throughput_ratio",
        "burst_ttft_ratio",
    }
    assert [row["budget"] for row in report.rows] == [None, 16, 16]
    assert [row[""] for row in report.rows].count("best") == 1
    assert ElementTree.parse(plot)


@pytest.mark.cluster
def test_memory(tiny_folder: Path, tmp_path: Path) -> None:
    report = memory.run(["--model", str(tiny_folder)])
    assert checked(report, tmp_path) == {"weights_private_share": 0.0}
    assert all(row["shared bytes"] for row in report.rows)
