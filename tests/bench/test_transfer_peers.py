"""The peers of the transfer bench: the script that runs them, and who starts it."""

from __future__ import annotations

import ctypes
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.bench import transfer_peer
from kvferry.bench.transfer_cache import BenchCache, cache_layout
from kvferry.bench.transfer_contenders import NIXL, peers_at_hand
from kvferry.bench.transfer_pair import Setting
from kvferry.bench.transfer_peers import WAYS, geometry, peer_command, peer_program
from kvferry.core.errors import StartupError
from kvferry.kv_transfer.layout import KvLayout
from kvferry.kv_transfer.transports.nixl_agent import why_not as nixl_is_missing

needs_nixl = pytest.mark.skipif(nixl_is_missing() is not None, reason=nixl_is_missing() or "")


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


def small_layout() -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


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
    return Setting(source=layout, target=layout, wire=layout.dtype, tokens=40, walked=40)


def test_a_peer_moves_in_the_way_that_is_its_fastest(tmp_path: Path) -> None:
    with peer_program(program(tmp_path / "peer.py", ANSWERS), setting(), {}) as peer:
        assert peer.name == "fake"
        batch = peer.transfer(8, 3)
        assert list(batch.latencies_s) == [2.0] * 3
        assert (batch.wall_s, batch.cpu_s) == (6.0, 1.5)
        assert peer.way(8) == "slabs of 2 MiB"


def test_a_peer_stands_still_between_its_turns(tmp_path: Path) -> None:
    names_itself = ANSWERS.replace('"fake"', "str(__import__('os').getpid())")
    with peer_program(program(tmp_path / "peer.py", names_itself), setting(), {}) as peer:
        state = Path(f"/proc/{peer.name}/stat")
        for _ in range(3):
            deadline = time.monotonic() + 10.0
            while state.read_text().rpartition(")")[2].split()[0] != "T":
                assert time.monotonic() < deadline
            assert len(peer.transfer(8, 3).latencies_s) == 3
    assert not state.exists()


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
        geometry(replace(setting(), wire="int8"))


@needs_nixl
def test_nixl_moves_blocks_both_ways_in_its_own_program() -> None:
    layout = cache_layout(16)
    real = Setting(source=layout, target=layout, wire=layout.dtype, tokens=64, walked=64)
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
