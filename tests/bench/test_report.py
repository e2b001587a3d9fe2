from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.bench.machine import commit, machine_facts
from kvferry.bench.report import Better, Claim, Report, claim_from, format_scalar
from kvferry.bench.stats import bootstrap_median, interleaved_pairs, interquartile, paired_ratio


def report() -> Report:
    return Report(
        bench="pd",
        rows=[{"mode": "pd", "ttft_ms": 12.3456}, {"mode": "colocated", "ttft_ms": 11.0, "n": 5}],
        claims=[
            Claim(id="ttft_ratio", value=1.04, better=Better.LOWER, goal=1.1, n=20, spread=0.01),
            Claim(id="tokens_per_s", value=90.0, better=Better.HIGHER, goal=100.0),
            Claim(id="seen", value=3.0, better=Better.HIGHER),
        ],
        machine={"cpu": "test", "cores": 2},
        commit="abc",
    )


def test_a_goal_is_met_on_its_good_side() -> None:
    assert [claim.met for claim in report().claims] == [True, False, None]
    assert not report().all_met


def test_json_has_the_agreed_keys(tmp_path: Path) -> None:
    report().write(tmp_path / "pd.json")
    written = json.loads((tmp_path / "pd.json").read_text())
    assert set(written) == {"bench", "commit", "machine", "options", "rows", "claims"}
    keys = {"id", "value", "goal", "better", "n", "spread", "unit", "met"}
    assert all(set(claim) == keys for claim in written["claims"])
    assert written["claims"][0]["better"] == "lower"
    assert list(tmp_path.iterdir()) == [tmp_path / "pd.json"]


def test_a_number_that_json_lacks_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    broken = Report(bench="x", rows=[{"a": float("nan")}], machine={}, commit="abc")
    with pytest.raises(ValueError, match="JSON"):
        broken.write(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_the_table_shows_rows_claims_and_machine() -> None:
    console = Console(width=120, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        report().print(console)
    text = captured.get()
    assert "12.35" in text
    assert "NOT MET" in text
    assert "<= 1.1" in text
    assert "commit abc; cpu test, cores 2" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (1.0, "1"), (123456.7, "123,457"), (12345, "12,345"), (True, "True"), ("a", "a")],
)
def test_scalars_for_people(value: str | float | None, text: str) -> None:
    assert format_scalar(value) == text


def test_machine_facts_are_plain() -> None:
    facts = machine_facts()
    assert {"cpu", "cores", "memory_bytes", "python", "torch", "ray"} <= set(facts)
    assert json.loads(json.dumps(facts)) == facts
    assert commit()


def test_the_interval_holds_the_median_and_narrows_with_more_values() -> None:
    few = bootstrap_median([1.0, 2.0, 3.0, 4.0, 5.0])
    many = bootstrap_median([1.0, 2.0, 3.0, 4.0, 5.0] * 40)
    assert few.low <= few.median <= few.high
    assert few.median == many.median == 3.0
    assert many.spread < few.spread
    assert claim_from(few, id="x", better=Better.LOWER).n == 5


def test_no_values_have_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap_median([])


def test_quartiles() -> None:
    assert interquartile([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert interquartile([7.0]) == 0.0


def test_pairs_alternate_who_goes_first() -> None:
    order: list[str] = []

    def ours() -> float:
        order.append("a")
        return 2.0

    def theirs() -> float:
        order.append("b")
        return 1.0

    measured, compared = interleaved_pairs(ours, theirs, 4)
    assert "".join(order) == "abbaabba"
    ratio = paired_ratio(measured, compared)
    assert (ratio.median, ratio.low, ratio.high, ratio.n) == (2.0, 2.0, 2.0, 4)


def test_unequal_numbers_of_pairs_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="argument"):
        paired_ratio([1.0, 2.0], [1.0])
