"""The KV plane on a CUDA device: as on the host, in the order of events, between processes."""

from __future__ import annotations

import pytest
import torch

# A bare GPU host has neither unless it was told.
pytest.importorskip("msgspec")
pytest.importorskip("xxhash")

from kvferry.bench import kv_device_checks, kv_device_ipc
from kvferry.bench.kv_device import nccl_part, peer_over, start_peer
from kvferry.bench.kv_device_kit import DeviceCache, Kit, cuda_kit, form_of
from kvferry.core.span import Span
from kvferry.kv_transfer.device_memory import DeviceKvMemory
from kvferry.kv_transfer.device_stream import Event

pytestmark = pytest.mark.gpu

WHOLE = Span(0, 4)
CYCLES = 500_000_000
"""Of a kernel that only waits: some tenths of a second."""


@pytest.fixture
def kit() -> Kit:
    return cuda_kit()


def make_cache(kit: Kit, seed: int = 0) -> DeviceCache:
    return DeviceCache(kit, layers=4, num_tokens=1000, dtype="bfloat16", fill=True, seed=seed)


def make_slab(cache: DeviceCache) -> torch.Tensor:
    nbytes = cache.move(0, WHOLE, "bfloat16").nbytes
    slab = torch.zeros(nbytes, dtype=torch.uint8, device=cache.slots.device)
    torch.cuda.synchronize()
    return slab


def pack(cache: DeviceCache, slab: torch.Tensor, after: object = None) -> list[int]:
    move = cache.move(0, WHOLE, "bfloat16")
    return cache.memory.pack(cache.blocks, move, form_of("bfloat16"), slab, after)


@pytest.mark.parametrize("case", kv_device_checks.cases(777), ids=lambda case: case.name)
def test_device_and_host_agree(kit: Kit, case: kv_device_checks.Case) -> None:
    assert kv_device_checks.check(kit, case) is None


def test_a_pack_waits_for_its_event_and_for_nothing_after_it(kit: Kit) -> None:
    cache = make_cache(kit)
    slab, values = make_slab(cache), torch.randn_like(cache.slots)
    pack(cache, slab)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    cache.slots.copy_(values)
    computed = torch.cuda.Event()
    computed.record()
    torch.cuda._sleep(CYCLES)
    rest = torch.cuda.Event()
    rest.record()
    digests = pack(cache, slab, computed)
    assert computed.query()
    assert not rest.query()
    torch.cuda.synchronize()
    again = torch.zeros_like(slab)
    torch.cuda.synchronize()
    assert pack(cache, again) == digests
    assert torch.equal(slab, again)


def test_nothing_in_a_pack_makes_the_host_wait_but_its_own_event(kit: Kit) -> None:
    cache = make_cache(kit)
    slab = make_slab(cache)
    pack(cache, slab)
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack(cache, slab)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_the_compute_stream_reads_what_was_scattered(kit: Kit) -> None:
    source, target = make_cache(kit), make_cache(kit, seed=1)
    slab, read = make_slab(source), []
    pack(source, slab)

    def step(event: Event) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(event)
        read.append(target.slots.clone())

    memory = DeviceKvMemory(target.slots, target.layout, target.generations, on_scatter=step)
    move = target.move(0, WHOLE, "bfloat16")
    memory.scatter(target.blocks, move, form_of("bfloat16"), slab)
    torch.cuda.synchronize()
    assert torch.equal(read[0], target.slots)


def test_two_processes_share_device_memory(kit: Kit) -> None:
    with peer_over("cuda_ipc", start_peer()) as channel:
        rows, claims = kv_device_ipc.receive_all(channel, kit, [1 << 20, 32 << 20], 3)
    assert [row["outcome"] for row in rows] == ["verified", "verified"]
    assert all(claim.met is not False for claim in claims)


def test_two_gpus_over_nccl(kit: Kit) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    (row,), _ = nccl_part(kit)
    assert row["outcome"] == "right"
