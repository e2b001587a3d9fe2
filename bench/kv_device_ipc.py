"""cuda_ipc between two processes: how fast one packs into memory that the other one owns.

The sender packs a whole cache, a layer per slab, and times it beside a plain copy of as many bytes
on the same device. The receiver then scatters the slabs and compares digests. Frames of the control
channel carry what each has to say.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvferry.bench.kv_device_kit import DeviceCache, Kit, form_of
from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import interleaved_pairs, paired_ratio
from kvferry.core.errors import StartupError
from kvferry.core.span import Span
from kvferry.kv_transfer.plan import SlabMove
from kvferry.kv_transfer.transport import Channel, Inlet, Outlet

DTYPE = "bfloat16"
LAYERS = 4
"""And slabs."""
SIZES = (1 << 20, 16 << 20, 256 << 20, 1 << 30)
MEMORY_FACTOR = 8
"""Of the largest size: two caches, the slabs, two buffers to copy between, and room to spare."""
TIMEOUT_S = 120.0
GOAL = 0.85


def sizes_for(free_nbytes: int, sizes: Sequence[int] = SIZES) -> list[int]:
    """Those that fit the memory. Raises StartupError when none does."""
    fitting = [size for size in sizes if size * MEMORY_FACTOR <= free_nbytes]
    if not fitting:
        raise StartupError(f"{free_nbytes} bytes of device memory are free: too few")
    return fitting


def slab_bytes_for(kit: Kit, sizes: Sequence[int]) -> int:
    """A layer of the largest cache."""
    return max(kit.tokens_for(size, LAYERS, DTYPE) for size in sizes) * kit.token_nbytes(DTYPE)


def send_all(channel: Channel, kit: Kit) -> None:
    """The sender's side. Raises LinkLost when the receiver is gone."""
    orders = _hear(channel)
    sizes, pairs = orders["sizes"], orders["pairs"]
    outlet = channel.open_outlet(LAYERS, slab_bytes_for(kit, sizes), TIMEOUT_S)
    for size in sizes:
        _tell(channel, packs_of(_cache(kit, size, fill=True), kit, outlet, pairs))
        _hear(channel)


def packs_of(cache: DeviceCache, kit: Kit, outlet: Outlet, pairs: int) -> dict[str, Any]:
    """Seconds of packs and of copies of as many bytes, in pairs; the digests of the last pack."""
    copy = Copy(kit, cache.slots.nbytes)
    pack_s, copy_s = interleaved_pairs(
        lambda: _timed(kit, lambda: pack_cache(cache, outlet)), lambda: _timed(kit, copy), pairs
    )
    return {"pack_s": pack_s, "copy_s": copy_s, "digests": pack_cache(cache, outlet)}


def receive_all(
    channel: Channel, kit: Kit, sizes: Sequence[int], rounds: int
) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """The receiver's side: a row per size, and claims."""
    _tell(channel, {"sizes": list(sizes), "pairs": rounds})
    inlet = channel.open_inlet(LAYERS, slab_bytes_for(kit, sizes), TIMEOUT_S)
    rows: list[dict[str, Scalar]] = []
    claims: list[Claim] = []
    all_wrong = 0
    for size in sizes:
        cache = _cache(kit, size, fill=False)
        told = _hear(channel)
        scatters = [_scatters_of(cache, kit, inlet, told["digests"]) for _ in range(rounds)]
        wrong = sum(not right for _, right in scatters)
        all_wrong += wrong
        rows.append(_row(cache.slots.nbytes, told, [took_s for took_s, _ in scatters], wrong))
        if size == SIZES[-1]:
            ratio = paired_ratio(told["copy_s"], told["pack_s"])
            claims.append(
                claim_from(ratio, id="kv.cuda_ipc_vs_copy", better=Better.HIGHER, goal=GOAL)
            )
        _tell(channel, {})
    claims.append(Claim(id="kv.cuda_ipc_wrong", value=all_wrong, better=Better.LOWER, goal=0))
    return rows, claims


def _scatters_of(
    cache: DeviceCache, kit: Kit, inlet: Inlet, expected: list[list[int]]
) -> tuple[float, bool]:
    """Seconds of a scatter of all slabs, and whether the digests were right."""
    started_s = kit.clock()
    under_way = [
        cache.memory.begin_scatter(
            cache.blocks, move, form_of(DTYPE), inlet.slab(move.index)[: move.nbytes]
        )
        for move in moves_of(cache)
    ]
    digests = [moving.finish() for moving in under_way]
    return kit.clock() - started_s, digests == expected


def _row(
    nbytes: int, told: dict[str, Any], scatter_s: Sequence[float], wrong: int
) -> dict[str, Scalar]:
    pack_s, copy_s = statistics.median(told["pack_s"]), statistics.median(told["copy_s"])
    both_s = pack_s + statistics.median(scatter_s)
    return {
        "part": "cuda_ipc",
        "case": f"{nbytes / 2**20:g} MiB in {LAYERS} slabs",
        "outcome": f"{wrong} scatters with wrong digests" if wrong else "verified",
        "pack_gbs": nbytes / pack_s / 1e9,
        "copy_gbs": nbytes / copy_s / 1e9,
        "percent_of_copy": 100 * paired_ratio(told["copy_s"], told["pack_s"]).median,
        "pack_and_scatter_gbs": nbytes / both_s / 1e9,
        "percent_of_two_copies": 100 * 2 * copy_s / both_s,
    }


def _cache(kit: Kit, size: int, *, fill: bool) -> DeviceCache:
    tokens = kit.tokens_for(size, LAYERS, DTYPE)
    return DeviceCache(kit, layers=LAYERS, num_tokens=tokens, dtype=DTYPE, fill=fill, seed=fill)


def moves_of(cache: DeviceCache) -> list[SlabMove]:
    """A slab per layer."""
    return [cache.move(layer, Span(layer, layer + 1), DTYPE) for layer in range(LAYERS)]


def pack_cache(cache: DeviceCache, outlet: Outlet) -> list[list[int]]:
    """All slabs, side by side: their digests."""
    under_way = [
        cache.memory.begin_pack(
            cache.blocks, move, form_of(DTYPE), outlet.slab(move.index)[: move.nbytes]
        )
        for move in moves_of(cache)
    ]
    return [moving.finish() for moving in under_way]


class Copy:
    """A copy of so many bytes within the device, waited for as a pack is."""

    def __init__(self, kit: Kit, nbytes: int) -> None:
        self._source, self._target = (
            torch.zeros(nbytes, dtype=torch.uint8, device=kit.device) for _ in range(2)
        )
        self._stream = kit.runtime.stream()

    def __call__(self) -> None:
        self._stream.enqueue(lambda: _copy(self._target, self._source))
        self._stream.record().synchronize()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _timed(kit: Kit, work: Callable[[], object]) -> float:
    started_s = kit.clock()
    work()
    return kit.clock() - started_s


def _tell(channel: Channel, what: dict[str, Any]) -> None:
    channel.send(json.dumps(what).encode(), TIMEOUT_S)


def _hear(channel: Channel) -> dict[str, Any]:
    frame = channel.receive(TIMEOUT_S)
    while frame is None:
        frame = channel.receive(TIMEOUT_S)
    heard: dict[str, Any] = json.loads(frame)
    return heard
