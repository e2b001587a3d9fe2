"""The parts of the transfer bench; the whole of it at sizes that measure nothing."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from kvferry.bench import transfer
from kvferry.bench.report import Report
from kvferry.bench.transfer_cache import BenchCache, Copier, Walk, block_order, cache_layout
from kvferry.bench.transfer_copy import Copies, Copying
from kvferry.bench.transfer_pair import Setting
from kvferry.bench.transfer_relayout import VARIANTS
from kvferry.core.errors import ConfigError
from kvferry.core.span import Span
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import SlabMove, cut
from kvferry.kv_transfer.transport import Slab

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
    walk = Walk(tokens=16, held=100, whole=8)
    parts = [walk.part(number) for number in range(6)]
    assert parts[:5] == [(0, 16), (16, 32), (32, 48), (48, 64), (64, 80)]
    assert all(begin % 8 == 0 and end <= 100 for begin, end in parts)
    assert Walk(tokens=100, held=100, whole=8).part(7) == (0, 100)


def test_transfers_take_turns_in_what_is_walked_unless_they_are_longer() -> None:
    layout = small_layout()
    setting = Setting(source=layout, target=layout, wire=layout.dtype, tokens=80, walked=40)
    parts = [setting.walk(16).part(number) for number in range(20)]
    assert {begin for begin, _ in parts} == {0, 4, 8, 12, 16, 20, 24}
    assert {setting.walk(60).part(number) for number in range(20)} == {(0, 60)}


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


class Recording:
    """Memory whose moves are written down; both ways to copy are asked for their time alone."""

    def __init__(self, cache: BenchCache) -> None:
        self.layout, self.rank, self.digests = cache.layout, 0, ("xxh3",)
        self._memory = cache.memory
        self.packed: list[SlabMove] = []
        self.scattered: list[SlabMove] = []

    def is_fresh(self, blocks: BlockTable, move: SlabMove) -> bool:
        return True

    def pack(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab, after: object = None
    ) -> list[int]:
        self.packed.append(move)
        return self._memory.pack(blocks, move, form, slab)

    def scatter(self, blocks: BlockTable, move: SlabMove, form: Form, slab: Slab) -> list[int]:
        self.scattered.append(move)
        return self._memory.scatter(blocks, move, form, slab)


@pytest.mark.parametrize("copying", Copying)
def test_copies_of_the_bound_are_the_moves_of_one_side_of_transfers(copying: Copying) -> None:
    layout = small_layout()
    cache = BenchCache(layout, 40, 1)
    cache.memory = memory = Recording(cache)
    walk = Walk(tokens=16, held=40, whole=4)
    copies = Copies(cache, layout.token_bytes * 64)
    assert all(copies.rate(copying, walk, 1e-9) > 0 for _ in range(3))
    moves = memory.packed if copying is Copying.OUT else memory.scattered
    assert len(memory.packed) + len(memory.scattered) == len(moves)
    # Every other transfer is copied as one run.
    assert [move.tokens for move in moves] == [walk.part(number) for number in (0, 2, 4)]
    assert all(move.layers == layout.whole.layers for move in moves)
