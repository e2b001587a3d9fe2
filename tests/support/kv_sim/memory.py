"""A cache whose packs and scatters take time, in which everybody else goes on."""

from __future__ import annotations

from kv_sim.clock import Actor
from kv_sim.defects import Defect
from kv_sim.workers import Worker
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.memory import Form
from kvferry.kv_transfer.plan import SlabMove


class SlowMemory:
    """One link's view of a worker's cache."""

    def __init__(self, worker: Worker) -> None:
        self.actor: Actor | None = None
        """The link's thread."""
        self._worker = worker
        self._memory = worker.memory
        self.layout, self.rank = worker.memory.layout, worker.memory.rank
        self.digests = worker.memory.digests
        self.is_fresh = worker.memory.is_fresh
        if worker.world.defect is Defect.NO_GENERATIONS:
            self.is_fresh = lambda blocks, move: True

    def pack(
        self,
        blocks: BlockTable,
        move: SlabMove,
        form: Form,
        slab: memoryview,
        after: object = None,
        progress: Progress | None = None,
    ) -> list[int]:
        self._work(self._worker.world.meddling.in_copy(self._worker, blocks))
        digests = self._memory.pack(blocks, move, form, slab, after)
        if progress is not None:
            progress.tell_filled(1)
        self._work()
        return digests

    def scatter(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: memoryview
    ) -> list[int]:
        self._work(self._worker.world.meddling.in_copy(self._worker, blocks))
        digests = self._memory.scatter(blocks, move, form, slab)
        self._work()
        return digests

    def followed_from(self, *_: object) -> int:
        return 0

    def follow(
        self, blocks: BlockTable, move: SlabMove, form: Form, slab: memoryview, progress: Progress
    ) -> list[int] | None:
        """Writes what is in the slab, be it of an earlier use."""
        digests = self.scatter(blocks, move, form, slab)
        is_filled = progress.is_filled(1)
        what = "filled" if is_filled else "not filled"
        self._worker.world.covered[f"a slab that is {what} is followed"] += 1
        if is_filled and progress.is_sealed_with(digests):
            self._worker.world.covered["a slab that is sealed is followed"] += 1
        return digests if is_filled else None

    def _work(self, longer_s: float = 0.0) -> None:
        assert self.actor is not None
        self._worker.copying += 1
        try:
            self._worker.busy(self.actor, self._worker.world.pace.copy_s() + longer_s)
        finally:
            self._worker.copying -= 1
