"""Device caches against host caches: the same bytes, and digests that both sides agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvferry.bench.kv_device_kit import DeviceCache, Kit, form_of
from kvferry.bench.report import Better, Claim, Scalar
from kvferry.core.span import Span
from kvferry.kv_transfer.memory import PagedKvMemory

LAYERS = 2
TYPES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float8_e4m3fn"),
    ("bfloat16", "int8"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("int8", "int8"),
)
"""(cache, wire)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way from one cache into another and back."""

    dtype: str
    wire: str
    num_tokens: int
    in_host_slab: bool

    @property
    def name(self) -> str:
        where = "host slab" if self.in_host_slab else "device slab"
        return f"{self.dtype} as {self.wire}, {self.num_tokens} tokens, {where}"


def cases(num_tokens: int) -> list[Case]:
    return [Case(*types, num_tokens, in_host) for types in TYPES for in_host in (False, True)]


def check_all(kit: Kit, num_tokens: int) -> tuple[list[dict[str, Scalar]], Claim]:
    """A row per case with what is wrong, if anything, and one claim."""
    rows: list[dict[str, Scalar]] = []
    for case in cases(num_tokens):
        rows.append({"part": "memory", "case": case.name, "outcome": check(kit, case) or "same"})
    wrong = sum(row["outcome"] != "same" for row in rows)
    claim = Claim(id="kv.device_mismatches", value=wrong, better=Better.LOWER, goal=0, n=len(rows))
    return rows, claim


def check(kit: Kit, case: Case) -> str | None:
    """Device -> host -> device. What differs first; None when nothing does.

    A conversion may round ties as it likes; what it made then has to arrive as it is.
    """
    source = DeviceCache(
        kit, layers=LAYERS, num_tokens=case.num_tokens, dtype=case.dtype, fill=True
    )
    move, form = source.move(5, Span(0, LAYERS), case.wire), form_of(case.wire)
    slab = _slab(kit, move.nbytes, case.in_host_slab)
    digests = source.memory.pack(source.blocks, move, form, slab)
    packed = _host_copy(slab)
    host = _on_host(source)
    if case.dtype == case.wire:
        expected = _slab(kit, move.nbytes, True)
        if host.pack(source.blocks, move, form, expected) != digests:
            return "the digests of a pack differ"
        if bytes(expected) != bytes(packed):
            return "the bytes of a pack differ"
    if host.scatter(source.blocks, move, form, packed) != digests:
        return "the host finds other digests in what the device packed"
    target = DeviceCache(
        kit, layers=LAYERS, num_tokens=case.num_tokens, dtype=case.dtype, fill=False, seed=1
    )
    if target.memory.scatter(target.blocks, move, form, slab) != digests:
        return "the digests of a scatter differ"
    again = _slab(kit, move.nbytes, case.in_host_slab)
    target.memory.pack(target.blocks, move, form, again)
    if case.dtype == case.wire and bytes(_host_copy(again)) != bytes(packed):
        return "what was scattered is not what was packed"
    return None


def _slab(kit: Kit, nbytes: int, in_host: bool) -> Any:
    if in_host:
        return memoryview(torch.zeros(nbytes, dtype=torch.uint8).numpy())
    slab = torch.zeros(nbytes, dtype=torch.uint8, device=kit.device)
    kit.settle()
    return slab


def _host_copy(slab: Any) -> memoryview:
    if isinstance(slab, torch.Tensor):
        return memoryview(slab.cpu().numpy().copy())
    return memoryview(bytearray(slab))


def _on_host(cache: DeviceCache) -> PagedKvMemory:
    """A cache of its own with the same KV."""
    scales = None if cache.scales is None else cache.scales.cpu().clone()
    return PagedKvMemory(cache.slots.cpu().clone(), cache.layout, cache.generations, scales=scales)
