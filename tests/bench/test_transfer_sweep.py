"""Rates over sizes, what is claimed of them, and their plot."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from kvferry.bench.transfer_pair import Batch
from kvferry.bench.transfer_plot import rate_plot
from kvferry.bench.transfer_sweep import (
    Contender,
    Probes,
    Sweep,
    run_sweep,
    sweep_claims,
    sweep_rows,
)

MIB = 1 << 20


def fake(name: str, rates: dict[int, list[float]], log: list[str] | None = None) -> Contender:
    """Moves so many tokens (of one byte) at these rates, one after the other."""
    left = {tokens: [*found] for tokens, found in rates.items()}

    def transfer(tokens: int, count: int) -> Batch:
        if log is not None:
            log.append(name)
        # The first one warms up.
        rate = left[tokens].pop(0)
        return Batch([tokens / rate] * count, tokens / rate * count, 0.5 * count)

    return Contender(name, transfer)


def swept(shm: list[float], nixl: list[float], bound: float = 100.0) -> Sweep:
    sizes = {4 * MIB: 4 * MIB, 8 * MIB: 8 * MIB}
    contenders = [
        fake("shm", {4 * MIB: [1, *shm], 8 * MIB: [1, *(2 * rate for rate in shm)]}),
        fake("NIXL", {4 * MIB: [1, *nixl], 8 * MIB: [1, *nixl]}),
    ]
    return run_sweep(contenders, sizes, len(shm), 4, Probes(lambda tokens: bound, lambda: 50.0))


def test_a_claim_is_about_the_worst_size() -> None:
    claims = {c.id: c for c in sweep_claims(swept([80, 90, 70], [40, 40, 40]), [], ["NIXL"])}
    assert claims["shm_vs_bound"].value == pytest.approx(0.8)
    assert claims["shm_vs_bound"].met is False
    assert claims["shm_vs_nixl"].value == pytest.approx(2.0)
    assert claims["shm_vs_nixl"].met
    assert "tcp_vs_peers" not in claims


def test_ratios_are_of_the_same_round() -> None:
    """A machine that slows down for a round slows both."""
    claims = {c.id: c for c in sweep_claims(swept([10, 90, 50], [10, 90, 50]), [], ["NIXL"])}
    assert claims["shm_vs_nixl"].value == pytest.approx(1.0)
    assert claims["shm_vs_nixl"].spread == pytest.approx(0.0)


def test_the_bound_is_of_transfers_of_the_same_size() -> None:
    sizes = {4 * MIB: 4 * MIB, 8 * MIB: 8 * MIB}
    contenders = [fake("shm", {4 * MIB: [1, 80], 8 * MIB: [1, 80]})]
    probes = Probes({4 * MIB: 100.0, 8 * MIB: 200.0}.__getitem__, lambda: 50.0)
    sweep = run_sweep(contenders, sizes, 1, 4, probes)
    assert sweep.bounds == {4 * MIB: [100.0], 8 * MIB: [200.0]}
    (claim,) = (c for c in sweep_claims(sweep, [], []) if c.id == "shm_vs_bound")
    assert claim.value == pytest.approx(0.4)


def test_small_sizes_are_not_claimed() -> None:
    contenders = [fake("shm", {MIB: [1, 10]})]
    sweep = run_sweep(contenders, {MIB: MIB}, 1, 4, Probes(lambda tokens: 100.0, lambda: 50.0))
    assert sweep_claims(sweep, [], []) == []


def test_the_best_of_several_peers_is_what_counts() -> None:
    sizes = {4 * MIB: 4 * MIB}
    rates = {"tcp": 30.0, "NIXL over TCP": 10.0, "Mooncake over TCP": 20.0}
    contenders = [fake(name, {4 * MIB: [1, rate]}) for name, rate in rates.items()]
    sweep = run_sweep(contenders, sizes, 1, 4, Probes(lambda tokens: 100.0, lambda: 60.0))
    claims = {c.id: c for c in sweep_claims(sweep, ["NIXL over TCP", "Mooncake over TCP"], [])}
    assert claims["tcp_vs_peers"].value == pytest.approx(1.5)
    assert claims["tcp_of_raw"].value == pytest.approx(0.5)
    assert claims["tcp_of_raw"].goal is None


def test_contenders_take_turns() -> None:
    log: list[str] = []
    contenders = [fake(name, {MIB: [1, 1, 1, 1]}, log) for name in "abc"]
    run_sweep(contenders, {MIB: MIB}, 3, 1, Probes(lambda tokens: 1.0, lambda: 1.0))
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"


def test_who_cannot_hold_a_size_sits_it_out() -> None:
    small = Contender("small", lambda tokens, count: Batch([1.0], 1.0, 0.0), most_bytes=MIB)
    large = Contender("large", lambda tokens, count: Batch([1.0], 1.0, 0.0))
    probes = Probes(lambda tokens: 1.0, lambda: 1.0)
    sweep = run_sweep([small, large], {MIB: MIB, 2 * MIB: 2 * MIB}, 1, 1, probes)
    rows = list(sweep_rows(sweep, [small, large]))
    assert [(row["what"], row["KiB"]) for row in rows if row["what"] in ("small", "large")] == [
        ("small", 1024),
        ("large", 1024),
        ("large", 2048),
    ]


def test_rows_hold_rates_shares_and_processor_time() -> None:
    rows = {str(row["what"]): row for row in sweep_rows(swept([50.0], [25.0]), [])}
    assert rows["two-copy bound"]["GB/s"] == pytest.approx(100.0 / 1e9)
    contender = Contender("shm", lambda tokens, count: Batch([], 0.0, 0.0))
    (row, _) = [r for r in sweep_rows(swept([50.0], [25.0]), [contender]) if r["what"] == "shm"]
    assert row["GB/s"] == pytest.approx(50.0 / 1e9)
    assert row["of peak"] == pytest.approx(0.5)
    assert row["CPU s/GB"] == pytest.approx(0.5 / (4 * MIB) * 1e9)
    assert row["n"] == 4


def test_a_plot_has_a_line_and_a_name_for_each() -> None:
    lines = {"a < b": [(1e6, 0.5), (1e9, 4.0)], "c": [(1e6, 2.0)]}
    root = ElementTree.fromstring(rate_plot("rates & sizes", lines, frozenset({"c"})))
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b", "c", "rates & sizes", "GB/s"} <= set(names)
    paths = [p for p in root.iter("{http://www.w3.org/2000/svg}path") if p.get("fill") == "none"]
    assert [path.get("stroke-dasharray") is not None for path in paths] == [False, True]
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 3
    (line, _) = (str(path.get("d")).lstrip("M").split("L") for path in paths)
    (x1, y1), (x2, y2) = (map(float, point.split()) for point in line)
    assert x1 < x2
    assert y1 > y2


def test_nothing_cannot_be_plotted() -> None:
    with pytest.raises(ValueError, match="nothing"):
        rate_plot("empty", {"a": []})
