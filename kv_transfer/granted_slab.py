"""One slab of a receiver's memory in the hands of a sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvferry.kv_transfer.messages import Filling, Header, SlabHeader
from kvferry.kv_transfer.outgoing import Transfer
from kvferry.kv_transfer.plan import SlabMove


class Stage(Enum):
    GRANTED = auto()
    FLYING = auto()
    SENT = auto()


@dataclass(slots=True)
class GrantedSlab:
    """What is in a slab, or will be."""

    slab: int
    grant: int
    transfer: Transfer
    index: int
    stage: Stage = Stage.GRANTED
    digests: Sequence[int] = ()
    """There once it is filled."""
    is_sealed: bool = False
    """The receiver finds the digests beside the slab: it needs no header, unless it asks."""
    pushed_s: float = 0.0

    @property
    def move(self) -> SlabMove:
        return self.transfer.slabs[self.index].move

    @property
    def filling(self) -> Filling:
        """What is said of it while it is being filled."""
        header = self._header([])
        return Filling(slab=self.slab, grant=self.grant, header=header, is_sealed=self.is_sealed)

    @property
    def header(self) -> Header:
        """What is said of it once it is filled."""
        header = self._header(list(self.digests))
        return Header(slab=self.slab, grant=self.grant, header=header)

    def _header(self, digests: list[int]) -> SlabHeader:
        job, move = self.transfer.job, self.move
        return SlabHeader(
            key=job.key,
            lease=job.lease,
            index=move.index,
            layers=move.layers,
            heads=move.heads,
            tokens=move.tokens,
            wire=job.wire,
            chain_hash=job.chain_hash,
            nbytes=move.nbytes,
            digests=digests,
        )
