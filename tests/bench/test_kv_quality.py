"""The quality bench carries KV, scores what follows, and says how sure it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.kv_quality import (
    EXACT,
    WIRES,
    Pool,
    Score,
    carry,
    claims_of,
    measure,
    run,
    windows_of,
)
from kvferry.bench.kv_quality_text import TEXT
from kvferry.bench.report import Report
from kvferry.core.errors import StartupError
from kvferry.models.load import load_model

torch.set_num_threads(1)

QUICK = ["--quick", "--threads", "1", "--model"]


@given(st.integers(0, 200), st.integers(1, 20), st.integers(1, 20))
def test_windows_score_each_token_once(count: int, context: int, scored: int) -> None:
    windows = list(windows_of(list(range(count)), context, scored))
    seen = [token for window in windows for token in window.scored[1:].tolist()]
    assert seen == list(range(context + 1, context + 1 + len(seen)))
    assert count - len(seen) <= context + scored + 1 or not windows
    for window in windows:
        assert window.scored[0] == window.context[-1] + 1
        assert len(window.context) == context


def test_carried_context_gives_the_logits_of_computed_context(tiny_folder: Path) -> None:
    decoder = load_model(tiny_folder, torch.float32)
    tokens = np.random.default_rng(1).integers(decoder.spec.vocab_size, size=60)
    source, target, whole = (Pool(decoder, size, 60) for size in (16, 32, 16))
    expected = whole.read(tokens, 0)[50:]
    source.read(tokens[:50], 0)
    carry(source, target, 50, EXACT)
    assert torch.allclose(target.read(tokens[50:], 50), expected, atol=1e-4)


def test_scores_by_hand() -> None:
    score = Score([], [])
    score.add(torch.tensor([[0.0, 0.0], [0.0, np.log(3.0)]]), np.array([0, 1]))
    assert np.allclose(score.loss, [np.log(2.0), np.log(4 / 3)])
    assert score.choice[1] == 1


def test_claims_compare_positions_in_pairs() -> None:
    exact = Score([np.array([1.0, 2.0, 3.0])], [np.array([1, 2, 3])])
    worse = Score([np.array([1.1, 2.1, 3.1])], [np.array([1, 2, 4])])
    scores = {EXACT: exact} | dict.fromkeys(WIRES, worse)
    claims = {claim.id: claim for claim in claims_of(scores)}
    assert set(claims) == {f"kv_{what}_{wire}" for what in ("perplexity", "top1") for wire in WIRES}
    found = claims["kv_perplexity_int8"]
    assert found.value == pytest.approx(100 * (np.exp(0.1) - 1))
    assert found.spread == pytest.approx(0, abs=1e-9)
    assert claims["kv_top1_int8"].value == pytest.approx(200 / 3)


def test_float_types_lose_less_than_one_byte_types(tiny_folder: Path) -> None:
    decoder = load_model(tiny_folder, torch.float32)
    tokens = np.random.default_rng(2).integers(decoder.spec.vocab_size, size=200).tolist()
    scores = measure(decoder, list(windows_of(tokens, 60, 20)))
    error = {wire: np.abs(score.loss - scores[EXACT].loss).max() for wire, score in scores.items()}
    assert error[EXACT] == 0
    assert 0 < error["float16"] < error["bfloat16"] < error["float8_e4m3fn"] < 1
    assert 0 < error["int8"] < 1


def test_the_command_runs(tiny_folder: Path, tmp_path: Path) -> None:
    report = run([*QUICK, str(tiny_folder)])
    assert isinstance(report, Report)
    report.write(tmp_path / "report.json")
    assert [row["wire"] for row in report.rows] == [EXACT, *WIRES]
    assert report.options["text"] == "ours"


def test_a_text_of_ones_own(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a few words")
    with pytest.raises(StartupError, match="one window needs more"):
        run([*QUICK, str(tiny_folder), "--text", str(path)])
    with pytest.raises(SystemExit):
        run([*QUICK, str(tiny_folder), "--text", str(tmp_path / "none.txt")])


def test_our_text_is_prose_without_line_breaks() -> None:
    assert len(TEXT.split()) > 900
    assert "\n" not in TEXT.replace("\n\n", "")
