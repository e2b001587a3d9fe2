"""From a slab into leased blocks, checked on both sides of the write."""

from __future__ import annotations

from kvferry.kv_transfer.jobs import ReceiveJob
from kvferry.kv_transfer.memory import Form, KvMemory
from kvferry.kv_transfer.messages import SlabHeader
from kvferry.kv_transfer.transport import Slab
from kvferry.kv_transfer.verdicts import Outcome


def scatter_verified(
    memory: KvMemory, job: ReceiveJob, header: SlabHeader, digest: str, slab: Slab
) -> Outcome:
    """Write a claimed slab into its lease's blocks. ``digest``: the link's scheme."""
    move = header.move
    if not memory.is_fresh(job.blocks, move):
        return Outcome.STALE
    digests = memory.scatter(job.blocks, move, Form(header.wire, digest), slab)
    if not memory.is_fresh(job.blocks, move):
        # It was given away while we wrote: whoever has it now must not trust it either.
        return Outcome.STALE
    return Outcome.VERIFIED if digests == header.digests else Outcome.DAMAGED
