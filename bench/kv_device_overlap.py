"""A push layer by layer beside the computation: what it costs, and that nobody waits for it.

A stand-in for a prefill: products, layer by layer, with an event after each. A thread of its own
packs each layer as soon as its event has passed.
"""

from __future__ import annotations

import statistics
import threading
from dataclasses import dataclass

import torch

from kvferry.bench.kv_device_kit import DeviceCache, Kit, form_of
from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import bootstrap_median
from kvferry.core.span import Span
from kvferry.kv_transfer.device_stream import Event

DTYPE = "bfloat16"
GOAL = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is computed and packed."""

    layers: int = 16
    nbytes: int = 512 << 20
    """KV of all layers."""
    width: int = 4096
    products: int = 8
    """Per layer, of square matrices."""
    rounds: int = 20


class Prefill:
    """Computes and packs, alone or side by side."""

    def __init__(self, kit: Kit, size: Size) -> None:
        self._kit = kit
        self._size = size
        self._compute = kit.compute()
        shape = (size.width, size.width)
        dtype = getattr(torch, DTYPE)
        self._weight = torch.eye(size.width, dtype=dtype, device=kit.device)
        self._x = torch.randn(shape, device=kit.device).to(dtype)
        self._cache = DeviceCache(
            kit,
            layers=size.layers,
            num_tokens=kit.tokens_for(size.nbytes, size.layers, DTYPE),
            dtype=DTYPE,
            fill=True,
        )
        self._slab = torch.zeros(
            self._cache.move(0, Span(0, 1), DTYPE).nbytes, dtype=torch.uint8, device=kit.device
        )
        kit.settle()

    def compute(self) -> list[Event]:
        """Enqueue all layers: the event of each."""
        events = []
        for _ in range(self._size.layers):
            self._compute.enqueue(self._layer)
            events.append(self._compute.record())
        return events

    def pack(self, events: list[Event] | None = None) -> None:
        """Pack all layers, each after its event."""
        for layer in range(self._size.layers):
            move = self._cache.move(layer, Span(layer, layer + 1), DTYPE)
            after = None if events is None else events[layer]
            self._cache.memory.pack(self._cache.blocks, move, form_of(DTYPE), self._slab, after)

    def compute_alone_s(self) -> float:
        started_s = self._kit.clock()
        self.compute()[-1].synchronize()
        return self._kit.clock() - started_s

    def pack_alone_s(self) -> float:
        started_s = self._kit.clock()
        self.pack()
        return self._kit.clock() - started_s

    def both_s(self) -> tuple[float, float, float]:
        """Seconds until (all was enqueued, all was computed, all was packed too)."""
        started_s = self._kit.clock()
        events = self.compute()
        enqueued_s = self._kit.clock() - started_s
        packer = threading.Thread(target=self.pack, args=(events,))
        packer.start()
        events[-1].synchronize()
        computed_s = self._kit.clock() - started_s
        packer.join()
        return enqueued_s, computed_s, self._kit.clock() - started_s

    def _layer(self) -> None:
        for _ in range(self._size.products):
            torch.mm(self._x, self._weight, out=self._x.new_empty(self._x.shape))


def measure(kit: Kit, size: Size) -> tuple[list[dict[str, Scalar]], list[Claim]]:
    """One row, and the exposed part of the push: what it adds to the computation, over what it
    takes alone.
    """
    prefill = Prefill(kit, size)
    prefill.compute_alone_s()
    prefill.pack_alone_s()
    exposed, computes, packs, boths = [], [], [], []
    for _ in range(size.rounds):
        compute_s, pack_s = prefill.compute_alone_s(), prefill.pack_alone_s()
        both = prefill.both_s()
        exposed.append((both[2] - compute_s) / pack_s)
        computes.append(compute_s)
        packs.append(pack_s)
        boths.append(both)
    median = statistics.median
    row: dict[str, Scalar] = {
        "part": "overlap",
        "case": f"{size.nbytes / 2**20:g} MiB in {size.layers} layers",
        "outcome": "done",
        "compute_ms": 1e3 * median(computes),
        "pack_ms": 1e3 * median(packs),
        "enqueued_ms": 1e3 * median(both[0] for both in boths),
        "computed_beside_packs_ms": 1e3 * median(both[1] for both in boths),
        "both_ms": 1e3 * median(both[2] for both in boths),
    }
    claim = claim_from(
        bootstrap_median(exposed), id="kv.device_exposed", better=Better.LOWER, goal=GOAL
    )
    return [row], [claim]
