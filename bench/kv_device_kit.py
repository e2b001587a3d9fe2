"""What the device checks of the KV plane run on: a CUDA device, or stand-ins in tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.bench.cuda_timer import require_cuda
from kvferry.core.span import Span
from kvferry.kv_transfer.device_memory import DIGEST, DeviceKvMemory
from kvferry.kv_transfer.device_stream import CudaRuntime, CudaStream, DeviceRuntime, Stream
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import QUANTISED_BYTES, KvLayout, head_nbytes
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import SlabMove, slab_nbytes

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kit:
    """A device with its streams and a clock."""

    device: torch.device
    runtime: DeviceRuntime
    compute: Callable[[], Stream]
    """A stream of ordinary priority."""
    settle: Callable[[], None]
    """Wait for all streams: what torch does on its own is in the order of none of ours."""
    free_nbytes: int
    """Device memory that nobody uses."""
    clock: Callable[[], float] = time.perf_counter
    heads: int = 8
    """KV heads of the caches."""
    head_dim: int = 128

    def token_nbytes(self, dtype: str) -> int:
        """One token's K and V in one layer."""
        return 2 * self.heads * head_nbytes(self.head_dim, dtype)

    def tokens_for(self, nbytes: int, layers: int, dtype: str) -> int:
        """How many tokens have about so many bytes of KV; at least one block."""
        return max(BLOCK_SIZE, nbytes // (layers * self.token_nbytes(dtype)))


def cuda_kit() -> Kit:
    """The current device. Raises StartupError where there is none."""
    device = require_cuda()
    return Kit(
        device=device,
        runtime=CudaRuntime(device),
        compute=lambda: CudaStream(device, priority=0),
        settle=lambda: torch.cuda.synchronize(device),
        free_nbytes=torch.cuda.mem_get_info(device)[0],
    )


class DeviceCache:
    """One rank's whole cache of ``num_tokens`` tokens, its blocks in random order."""

    def __init__(
        self, kit: Kit, *, layers: int, num_tokens: int, dtype: str, fill: bool, seed: int = 0
    ) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        self.layout = KvLayout(
            num_layers=layers,
            num_kv_heads=kit.heads,
            head_dim=kit.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        shape = (layers, 2, num_blocks * BLOCK_SIZE, kit.heads, kit.head_dim)
        self.slots = torch.zeros(shape, dtype=getattr(torch, dtype), device=kit.device)
        self.scales = None
        if dtype in QUANTISED_BYTES:
            self.scales = torch.zeros(shape[:-1], device=kit.device)
        if fill:
            self._fill(kit)
        kit.settle()
        self.generations = np.arange(1, num_blocks + 1, dtype=np.uint32)
        order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self.blocks = BlockTable(block_ids=order, generations=self.generations[order])
        self.tokens = Span(0, num_tokens)
        self.memory = DeviceKvMemory(
            self.slots, self.layout, self.generations, scales=self.scales, runtime=kit.runtime
        )

    def move(self, index: int, layers: Span, wire: str) -> SlabMove:
        """All heads and tokens of some layers."""
        heads = Span(0, self.layout.num_kv_heads)
        head_bytes = head_nbytes(self.layout.head_dim, wire)
        nbytes = slab_nbytes(head_bytes, layers, heads, self.tokens)
        return SlabMove(index, layers, heads, self.tokens, nbytes)

    def _fill(self, kit: Kit) -> None:
        """Layer by layer: random numbers of a float type take as much memory again."""
        for layer in self.slots:
            values = torch.randn(layer.shape, device=kit.device)
            layer.copy_(values if self.scales is None else values * 40)
        if self.scales is not None:
            self.scales.uniform_(0.01, 1.0)


def form_of(wire: str) -> Form:
    return Form(wire, DIGEST)
