"""From the slabs of one link into leased blocks, checked on both sides of the write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.kernels.kv_pack.progress import Progress, Stream
from kvferry.kv_transfer.jobs import ReceiveJob
from kvferry.kv_transfer.leases import LeaseTable
from kvferry.kv_transfer.memory import Form, KvMemory
from kvferry.kv_transfer.messages import Filling, Header, SlabHeader
from kvferry.kv_transfer.transport import Slab
from kvferry.kv_transfer.verdicts import Outcome, Source, Verdict

PATIENCE_S = 0.002
"""Whoever follows a pack gives up when it stands still for so long, and scatters the slab later."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """A slab that was scattered while it was filled."""

    job: ReceiveJob
    filling: Filling
    digests: list[int]
    num_scatters: int
    """Of its lease, this one included: with another one after it, it counts for nothing."""
    busy_s: float

    def is_of(self, message: Header) -> bool:
        """Whether the blocks hold what this header tells of, all of it as it was claimed."""
        ours, header = self.filling.header, message.header
        return (
            self.filling.grant == message.grant
            and (ours.key, ours.lease) == (header.key, header.lease)
            and (ours.wire, ours.chain_hash) == (header.wire, header.chain_hash)
            and ours.move == header.move
            and self.digests == header.digests
        )


class Scatter:
    """All of it belongs to the link's thread."""

    def __init__(
        self,
        memory: KvMemory,
        leases: LeaseTable,
        source: Source,
        digest: str,
        clock: Callable[[], float],
    ) -> None:
        """``digest``: the link's scheme."""
        self._memory = memory
        self._leases = leases
        self._source = source
        self._digest = digest
        self._clock = clock
        self._followed: _Followed | None = None
        """The newest: its sender fills one slab after another."""

    def follow(self, filling: Filling, slab: Slab, by: memoryview | Stream) -> Verdict | None:
        """Write a slab while it is being filled, if that can be done. The verdict on one whose seal
        says that it holds what was written; else None: its header decides whether that counts.
        """
        self._followed = None
        header = filling.header
        job = self._leases.claim_filling(self._source, header)
        if job is None:
            return None
        digests: list[int] | None = None
        is_verified, started_s = False, self._clock()
        try:
            progress = Progress(by, filling.grant, PATIENCE_S, filling.is_sealed)
            digests = self._copy_filling(job, header, slab, progress)
            if digests is not None and progress.has_seal and progress.is_sealed_with(digests):
                # Looked at after the seal was: what was given away meanwhile is not believed.
                is_verified = self._memory.is_fresh(job.blocks, header.move)
        finally:
            busy_s = self._clock() - started_s
            if not is_verified:
                num_scatters = self._leases.settle_filling(header)
        if is_verified:
            return self._leases.settle_sealed(self._source, header, busy_s)
        if digests is not None:
            self._followed = _Followed(job, filling, digests, num_scatters, busy_s)
        return None

    def settle_followed(self, message: Header) -> Verdict | None:
        """The verdict on a slab that is in its blocks already; None: it has to be claimed and
        written like any other.
        """
        followed, header = self._followed, message.header
        if followed is None or not followed.is_of(message):
            return None
        if not self._memory.is_fresh(followed.job.blocks, header.move):
            return None
        return self._leases.settle_followed(
            self._source, header, followed.num_scatters, followed.busy_s
        )

    def write(self, message: Header, claimed: Verdict, slab: Slab) -> Verdict:
        """Bring a claimed slab into its blocks and settle it."""
        assert claimed.job is not None
        header, outcome, started_s = message.header, Outcome.BROKEN, self._clock()
        try:
            outcome = self._copy(claimed.job, header, slab)
        finally:
            busy_s = self._clock() - started_s
            verdict = self._leases.settle(self._source, header, outcome, busy_s)
        return verdict

    def _copy_filling(
        self, job: ReceiveJob, header: SlabHeader, slab: Slab, progress: Progress
    ) -> list[int] | None:
        move, form = header.move, Form(header.wire, self._digest)
        if not self._memory.is_fresh(job.blocks, move):
            return None
        return self._memory.follow(job.blocks, move, form, slab, progress)

    def _copy(self, job: ReceiveJob, header: SlabHeader, slab: Slab) -> Outcome:
        memory, move = self._memory, header.move
        if not memory.is_fresh(job.blocks, move):
            return Outcome.STALE
        digests = memory.scatter(job.blocks, move, Form(header.wire, self._digest), slab)
        if not memory.is_fresh(job.blocks, move):
            # It was given away while we wrote: whoever has it now must not trust it either.
            return Outcome.STALE
        return Outcome.VERIFIED if digests == header.digests else Outcome.DAMAGED
