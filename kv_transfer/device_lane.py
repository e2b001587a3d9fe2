"""One stream of the KV plane on a device, with the staging memory that its work uses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.core.span import Span
from kvferry.kernels.kv_pack.slab import Generations, Tokens
from kvferry.kv_transfer.device_stream import DeviceRuntime
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.transport import Slab


class _Memory:
    """Memory that grows; ``take`` is legal once what was taken before is not in use."""

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._bytes = make(0)

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]"""
        if len(self._bytes) < nbytes:
            self._bytes = self._make(nbytes)
        return self._bytes[:nbytes]


class Lane:
    """Serves one move after the other, each from its first call to ``finish``; in between, the
    thread that has the lane does not wait. What it writes to pinned memory is safe from copies of
    the move before, which have ended by then.

    The copies and the kernel of a move are enqueued in one go, by ``run``: to enter a stream takes
    longer than to launch.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self.stream = runtime.stream()
        self._table, self._device_table = self._pair(runtime)
        self._live, self._device_live = self._pair(runtime)
        self._slab, self._device_slab = self._pair(runtime)
        self._totals = _Memory(runtime.pinned)
        self._seen: NDArray[np.uint32] | None = None
        """The generations on the device."""
        self._before: list[Callable[[], None]] = []
        """Copies that go before the kernel."""
        self._num_totals = 0
        self._fetched: memoryview | None = None

    def _pair(self, runtime: DeviceRuntime) -> tuple[_Memory, _Memory]:
        """Pinned memory, and memory of the device."""
        return _Memory(runtime.pinned), _Memory(self.stream.memory)

    def slab_for(self, slab: Slab, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] on the device: the slab itself, or staging for one in host memory."""
        return slab if isinstance(slab, torch.Tensor) else self._device_slab.take(nbytes)

    def bring(self, slab: Slab) -> None:
        """A slab in host memory is copied to its staging first."""
        if isinstance(slab, torch.Tensor):
            return
        pinned = self._slab.take(slab.nbytes)
        pinned.numpy()[:] = np.frombuffer(slab, np.uint8)
        staging = self.slab_for(slab, slab.nbytes)
        self._before.append(lambda: _copy(staging, pinned))

    def upload(
        self, blocks: BlockTable, tokens: Span, block_size: int, live: NDArray[np.uint32]
    ) -> Tokens:
        """The blocks of a token range are copied first, with their generations then and now.

        Raises ValueError when the table is too short.
        """
        first, end = tokens.begin // block_size, -(-tokens.end // block_size)
        ids, leased = blocks.block_ids[first:end], blocks.generations[first:end]
        if len(ids) < end - first:
            raise ValueError(f"tokens: {tokens} are not in {len(blocks.block_ids)} blocks")
        # Rows begin at multiples of 16 bytes: for kernels, other pointers are other code.
        shape = 2, -(-len(ids) // 4) * 4
        pinned, table = (
            memory.take(4 * shape[0] * shape[1]).view(torch.int32).view(shape)
            for memory in (self._table, self._device_table)
        )
        pinned.numpy()[0, : len(ids)] = ids
        pinned.numpy()[1, : len(ids)] = leased.view(np.int32)
        self._before.append(lambda: _copy(table, pinned))
        self._upload_generations(live)
        on_device = self._device_live.take(live.nbytes).view(torch.int32)
        return Tokens(
            blocks=table[0, : len(ids)],
            begin=tokens.begin - first * block_size,
            end=tokens.end - first * block_size,
            block_size=block_size,
            generations=Generations(on_device, table[1, : len(ids)]),
        )

    def run(
        self, kernel: Callable[[], torch.Tensor], num_totals: int, fetched: memoryview | None
    ) -> None:
        """Enqueue what goes before, a kernel that returns totals, and the copy of these to the
        host; then that of the staging, for ``finish`` to fill ``fetched`` with.
        """
        before, self._before = self._before, []
        totals = self._totals.take(8 * num_totals).view(torch.int64)
        self._num_totals = num_totals
        self._fetched = fetched

        def work() -> None:
            for copy in before:
                copy()
            _copy(totals, kernel())
            if fetched is not None:
                staging = self._device_slab.take(fetched.nbytes)
                _copy(self._slab.take(fetched.nbytes), staging)

        self.stream.enqueue(work)

    def finish(self) -> NDArray[np.int64]:
        """Wait for all that is enqueued. The totals, int64 [num_totals]."""
        self.stream.record().synchronize()
        if self._fetched is not None:
            slab, self._fetched = self._fetched, None
            np.frombuffer(slab, np.uint8)[:] = self._slab.take(slab.nbytes).numpy()
        pinned = self._totals.take(8 * self._num_totals)
        totals: NDArray[np.int64] = pinned.numpy().view(np.int64).copy()
        return totals

    def _upload_generations(self, live: NDArray[np.uint32]) -> None:
        if self._seen is not None and np.array_equal(self._seen, live):
            return
        self._seen = live.copy()
        pinned = self._live.take(live.nbytes).view(torch.int32)
        pinned.numpy()[:] = self._seen.view(np.int32)
        on_device = self._device_live.take(live.nbytes).view(torch.int32)
        self._before.append(lambda: _copy(on_device, pinned))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
