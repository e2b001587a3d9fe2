"""The parts of the transfer bench; the whole of it at sizes that measure nothing."""

from __future__ import annotations

import ctypes
import math
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from kvferry.bench import transfer, transfer_peer
from kvferry.bench.report import Report
from kvferry.bench.transfer_cache import BenchCache, Copier, block_order, cache_layout
from kvferry.bench.transfer_contenders import NIXL, peers_at_hand
from kvferry.bench.transfer_copy import copy_rate
from kvferry.bench.transfer_pair import Batch, Setting
from kvferry.bench.transfer_peers import WAYS, geometry, peer_command, peer_program
from kvferry.bench.transfer_plot import svg
from kvferry.bench.transfer_relayout import VARIANTS
from kvferry.bench.transfer_sweep import (
    Contender,
    Probes,
    Sweep,
    run_sweep,
    sweep_claims,
    sweep_rows,
)
from kvferry.core.errors import ConfigError, StartupError
from kvferry.kv_transfer.layout import KvLayout, Span
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.nixl_agent import why_not as nixl_is_missing
from kvferry.kv_transfer.plan import cut

MIB = 1 << 20
needs_nixl = pytest.mark.skipif(nixl_is_missing() is not None, reason=nixl_is_missing() or "")


@pytest.fixture(scope="module")
def report(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    plot = tmp_path_factory.mktemp("transfer") / "plot.svg"
    args = ["--quick", "--transports", "shm,loopback", "--model", str(tiny_folder)]
    found = transfer.run([*args, "--plot", str(plot)])
    ElementTree.parse(plot)
    return found


@pytest.mark.slow
def test_the_bench_makes_its_claims(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "report.json")
    claims = {claim.id: claim for claim in report.claims}
    assert {"shm_vs_bound", "relayout_overhead", "exposed_layerwise", "short_prompt_ratio"} <= set(
        claims
    )
    assert claims["shm_vs_bound"].goal == 0.85
    assert claims["exposed_layerwise"].goal == 0.20
    assert claims["short_prompt_ratio"].goal == 1.02
    assert all(math.isfinite(claim.value) for claim in report.claims)


@pytest.mark.slow
def test_the_bench_has_a_row_for_everything(report: Report) -> None:
    names = [str(row["what"]) for row in report.rows]
    assert names.count("shm") == names.count("loopback") == len(transfer.QUICK.nbytes)
    assert {f"shm: {variant.name}" for variant in VARIANTS} <= set(names)
    assert {name for name in names if name.startswith("prompt")} == {
        "prompt of 32 tokens, push layers",
        "prompt of 32 tokens, push whole",
        "prompt of 16 tokens, push auto",
        "prompt of 16 tokens, push whole",
    }


def test_the_full_run_pairs_as_often_as_was_promised() -> None:
    sizes = transfer.TransferSizes()
    assert sizes.pairs >= 20
    assert sizes.overlap.short_pairs >= 20
    assert sizes.overlap.short_tokens == 128
    assert sizes.overlap.long_tokens >= 1000
    assert sizes.relayout_bytes == 16 * MIB
    assert sizes.nbytes[0] == cache_layout(16).block_bytes
    assert transfer.FULL[-1] == 4 << 30


@pytest.mark.parametrize(
    "args",
    [["--sizes", "four"], ["--sizes", "1MiB,"], ["--sizes", "100GiB"], ["--transports", "pigeon"]],
)
def test_options_that_make_no_sense_are_refused(args: list[str]) -> None:
    with pytest.raises(ConfigError):
        transfer.run(args)


# Sweeps


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
    return run_sweep(contenders, sizes, len(shm), 4, Probes(lambda size, s: bound, lambda: 50.0))


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


def test_small_sizes_are_not_claimed() -> None:
    contenders = [fake("shm", {MIB: [1, 10]})]
    sweep = run_sweep(contenders, {MIB: MIB}, 1, 4, Probes(lambda size, s: 100.0, lambda: 50.0))
    assert sweep_claims(sweep, [], []) == []


def test_the_best_of_several_peers_is_what_counts() -> None:
    sizes = {4 * MIB: 4 * MIB}
    rates = {"tcp": 30.0, "NIXL over TCP": 10.0, "Mooncake over TCP": 20.0}
    contenders = [fake(name, {4 * MIB: [1, rate]}) for name, rate in rates.items()]
    sweep = run_sweep(contenders, sizes, 1, 4, Probes(lambda size, s: 100.0, lambda: 60.0))
    claims = {c.id: c for c in sweep_claims(sweep, ["NIXL over TCP", "Mooncake over TCP"], [])}
    assert claims["tcp_vs_peers"].value == pytest.approx(1.5)
    assert claims["tcp_of_raw"].value == pytest.approx(0.5)
    assert claims["tcp_of_raw"].goal is None


def test_contenders_take_turns() -> None:
    log: list[str] = []
    contenders = [fake(name, {MIB: [1, 1, 1, 1]}, log) for name in "abc"]
    run_sweep(contenders, {MIB: MIB}, 3, 1, Probes(lambda size, s: 1.0, lambda: 1.0))
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"


def test_who_cannot_hold_a_size_sits_it_out() -> None:
    small = Contender("small", lambda tokens, count: Batch([1.0], 1.0, 0.0), most_bytes=MIB)
    large = Contender("large", lambda tokens, count: Batch([1.0], 1.0, 0.0))
    probes = Probes(lambda size, s: 1.0, lambda: 1.0)
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


# Caches


def test_blocks_stand_where_the_seed_says() -> None:
    assert block_order(5, None) == [0, 1, 2, 3, 4]
    assert block_order(50, 1) == block_order(50, 1) != block_order(50, 2)
    assert sorted(block_order(50, 1)) == list(range(50))


def small_layout() -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


@pytest.mark.parametrize("copier", Copier)
def test_every_copier_takes_all_bytes_from_one_cache_to_another(copier: Copier) -> None:
    layout = small_layout()
    source, target = (BenchCache(layout, 40, order, copier) for order in (1, 2))
    with torch.no_grad():
        target.slots.zero_()
    form = Form(layout.dtype, source.memory.digests[0])
    for move in cut(layout.whole, Span(0, 40), layout.head_bytes, 2048):
        slab = memoryview(bytearray(move.nbytes))
        packed = source.memory.pack(source.blocks, move, form, slab)
        assert target.memory.scatter(target.blocks, move, form, slab) == packed
    elements = (cache.slots.flatten().sort().values for cache in (source, target))
    assert torch.equal(*elements)


def test_variants_fill_the_size_with_whole_blocks() -> None:
    for variant in VARIANTS:
        setting = variant.setting(16 * MIB)
        assert all(setting.tokens % block == 0 for block in variant.blocks)
        size = setting.nbytes(setting.tokens)
        assert 0.9 * 16 * MIB < size <= 16 * MIB


def test_copies_of_the_bound_have_a_rate() -> None:
    assert copy_rate(cache_layout(16).block_bytes, 0.001) > 0


# Plot


def test_a_plot_has_a_line_and_a_name_for_each() -> None:
    lines = {"a < b": [(1e6, 0.5), (1e9, 4.0)], "c": [(1e6, 2.0)]}
    root = ElementTree.fromstring(svg("rates & sizes", lines, frozenset({"c"})))
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
        svg("empty", {"a": []})


# Peers


class Copying:
    """An engine whose other side is in this process."""

    def __init__(self) -> None:
        self.writes: list[int] = []

    def register(self, memory: np.ndarray) -> None:
        pass

    def write(self, here: int, there: int, nbytes: int) -> None:
        self.writes.append(nbytes)
        ctypes.memmove(there, here, nbytes)


@pytest.mark.parametrize("blocks", [1, 3, 8])
@pytest.mark.parametrize("slab_blocks", [0, 1, 2, 5])
def test_the_peers_script_moves_the_blocks_it_is_told(blocks: int, slab_blocks: int) -> None:
    tables = [random.Random(seed).sample(range(8), 8) for seed in (1, 2)]
    shape = {"rows": 3, "run_bytes": 16}
    engine = Copying()
    source, target = (transfer_peer.Side(engine, shape, table) for table in tables)
    source.cache[:] = np.random.default_rng(0).integers(2, 256, source.cache.shape, np.uint8)
    for side in (source, target):
        assert side.block_bytes == 48
    if slab_blocks:
        for begin in range(0, blocks, slab_blocks):
            end = min(blocks, begin + slab_blocks)
            source.gather(0, begin, end)
            engine.write(source.staging.ctypes.data, target.staging.ctypes.data, 48 * (end - begin))
            target.scatter(0, begin, end)
    else:
        pairs = zip(source.addresses(), target.addresses(), strict=True)
        for here, there in list(pairs)[: 3 * blocks]:
            engine.write(int(here), int(there), 16)
    for number in range(8):
        got, sent = target.cache[:, tables[1][number]], source.cache[:, tables[0][number]]
        assert np.array_equal(got, sent) == (number < blocks)


def program(path: Path, body: str) -> list[str]:
    path.write_text(body)
    return [sys.executable, str(path)]


ANSWERS = """
import json, sys
print("noise")
geometry = json.loads(sys.stdin.readline())
print("RESULT " + json.dumps({"name": "fake"}), flush=True)
slow = {0: 5.0, 2 << 20: 1.0, 16 << 20: 3.0}
for line in sys.stdin:
    wanted = json.loads(line)
    print("more noise")
    latencies = [slow[wanted["slab_bytes"]] * wanted["blocks"]] * wanted["count"]
    print("RESULT " + json.dumps({"latencies_s": latencies, "cpu_s": 1.5}), flush=True)
"""


def setting() -> Setting:
    layout = small_layout()
    return Setting(source=layout, target=layout, wire=layout.dtype, tokens=40)


def test_a_peer_moves_in_the_way_that_is_its_fastest(tmp_path: Path) -> None:
    with peer_program(program(tmp_path / "peer.py", ANSWERS), setting(), {}) as peer:
        assert peer.name == "fake"
        batch = peer.transfer(8, 3)
        assert list(batch.latencies_s) == [2.0] * 3
        assert (batch.wall_s, batch.cpu_s) == (6.0, 1.5)
        assert peer.way(8) == "slabs of 2 MiB"


def test_a_peer_that_dies_is_told_of_with_its_last_words(tmp_path: Path) -> None:
    dies = program(tmp_path / "peer.py", "raise SystemExit('no such library')")
    with (
        pytest.raises(StartupError, match="no such library"),
        peer_program(dies, setting(), {}),
    ):
        pass
    with (
        pytest.raises(StartupError, match="could not be run"),
        peer_program(["/nonexistent"], setting(), {}),
    ):
        pass


def test_peers_hold_our_blocks() -> None:
    told = geometry(setting())
    cache = BenchCache(small_layout(), 40, 1)
    assert told["source"] == cache.blocks.block_ids.tolist()
    assert told["target"] != told["source"]
    assert told["rows"] * told["run_bytes"] == small_layout().block_bytes
    with pytest.raises(ValueError, match="as they are"):
        geometry(Setting(source=small_layout(), target=small_layout(), wire="int8", tokens=40))


@needs_nixl
def test_nixl_moves_blocks_both_ways_in_its_own_program() -> None:
    layout = cache_layout(16)
    real = Setting(source=layout, target=layout, wire=layout.dtype, tokens=64)
    with peer_program(peer_command(sys.executable, "nixl"), real, {}) as peer:
        assert peer.name == "NIXL"
        batch = peer.transfer(64, 2)
        assert len(batch.latencies_s) == 2
        assert min(batch.latencies_s) > 0
        assert batch.cpu_s > 0
    assert len(WAYS) == 3


def options(**changes: Any) -> Any:
    plain: dict[str, Any] = {"peer_nixl": None, "peer_mooncake": None, "quick": True}
    return SimpleNamespace(**(plain | changes))


def test_peers_are_those_named_and_nixl_where_it_is_installed() -> None:
    assert peers_at_hand(options()) == []
    named = peers_at_hand(options(peer_nixl="py1", peer_mooncake="py2"))
    assert [(peer.command[0], peer.command[2]) for peer in named] == [
        ("py1", "nixl"),
        ("py1", "nixl"),
        ("py2", "mooncake"),
    ]
    assert [peer.environment for peer in named] == [{}, {"UCX_TLS": "tcp,self"}, {}]
    at_hand = [peer.name for peer in peers_at_hand(options(quick=False))]
    assert (NIXL in at_hand) == (nixl_is_missing() is None)
