"""The parts of the transfer bench; the whole of it at sizes that measure nothing."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvferry.bench import transfer
from kvferry.bench.report import Report
from kvferry.bench.transfer_cache import BenchCache, Copier, block_order, cache_layout, part
from kvferry.bench.transfer_copy import copy_rate
from kvferry.bench.transfer_relayout import VARIANTS
from kvferry.core.errors import ConfigError
from kvferry.kv_transfer.layout import KvLayout, Span
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import cut

MIB = 1 << 20


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


def test_blocks_stand_where_the_seed_says() -> None:
    assert block_order(5, None) == [0, 1, 2, 3, 4]
    assert block_order(50, 1) == block_order(50, 1) != block_order(50, 2)
    assert sorted(block_order(50, 1)) == list(range(50))


def small_layout() -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def test_transfers_move_one_part_after_another() -> None:
    parts = [part(number, 16, held=100, whole=8) for number in range(6)]
    assert parts[:5] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 80)]
    assert all(begin % 8 == 0 and end <= 100 for begin, end in parts)
    assert part(7, 100, held=100, whole=8) == (0, 100)


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
        setting, tokens = variant.setting(64 * MIB), variant.tokens(16 * MIB)
        assert setting.tokens >= 3 * tokens
        assert all(tokens % block == 0 for block in variant.blocks)
        size = setting.nbytes(tokens)
        assert 0.9 * 16 * MIB < size <= 16 * MIB


def test_copies_of_the_bound_have_a_rate() -> None:
    assert copy_rate(cache_layout(16).block_bytes, 0.001) > 0
