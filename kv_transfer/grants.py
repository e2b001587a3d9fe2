"""The slabs of one receiver's link: free, granted, or filled and on their way in."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.core.ids import LeaseId
from kvferry.kernels.kv_pack.progress import Stream
from kvferry.kv_transfer.messages import PROBE_LEASE, Credit, Filling, Header, Sample, Spare
from kvferry.kv_transfer.transport import Inlet, Slab

PULLS = 4
"""Receives posted at once: more only queue up in the data path."""


@dataclass(slots=True)
class _Grant:
    number: int
    lease: LeaseId | None
    """None: the one that its sender fills it for first."""
    since_s: float
    message: Header | Sample | None = None
    """What the sender says of its bytes."""
    is_pulled: bool = False
    """A receive is posted, so the sender will push, whatever became of the lease."""
    has_landed: bool = False

    @property
    def is_posted(self) -> bool:
        return self.is_pulled and not self.has_landed

    @property
    def nbytes(self) -> int:
        match self.message:
            case Header():
                return self.message.header.nbytes
            case Sample():
                return self.message.nbytes
        return 0


class Grants:
    """Which slab is whose. A slab is free again once nothing can land in it any more."""

    def __init__(
        self, inlet: Inlet, num_slabs: int, slab_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._inlet = inlet
        self._slab_bytes = slab_bytes
        self._clock = clock
        self._free = list(range(num_slabs))
        """Last in, first out: its bytes may still be in the processor's cache."""
        self._grants: dict[int, _Grant] = {}
        """By slab, oldest first."""
        self._num_posted = 0
        self._num_spare = 0
        self.num_filled = 0
        """Granted slabs that are said to be filled."""
        self._last_grant = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_spare(self) -> int:
        """Granted to no lease so far."""
        return self._num_spare

    @property
    def is_idle(self) -> bool:
        """Whether no lease has a slab."""
        return len(self._grants) == self._num_spare

    def count(self, lease: LeaseId) -> int:
        """Slabs that a lease has."""
        return sum(grant.lease == lease for grant in self._grants.values())

    def give(self, lease: LeaseId) -> Credit:
        """Grant a free slab."""
        return Credit(lease=lease, slab=self._give(lease), grant=self._last_grant)

    def give_spares(self, most: int) -> list[Spare]:
        """Grant free slabs to whichever leases their sender fills them for, until there are so many
        of them.
        """
        spares: list[Spare] = []
        while self._free and self._num_spare < most:
            self._num_spare += 1
            spares.append(Spare(slab=self._give(None), grant=self._last_grant))
        return spares

    def again(self, older_s: float) -> list[Spare]:
        """The spare ones granted so long ago, and not named here meanwhile."""
        now = self._clock()
        spares: list[Spare] = []
        for slab, grant in self._grants.items():
            if grant.lease is None and now - grant.since_s >= older_s:
                grant.since_s = now
                spares.append(Spare(slab=slab, grant=grant.number))
        return spares

    def _give(self, lease: LeaseId | None) -> int:
        slab = self._free.pop()
        self._last_grant += 1
        self._grants[slab] = _Grant(self._last_grant, lease, self._clock())
        self._inlet.grant(slab, self._last_grant)
        return slab

    def _of(self, lease: int, message: Filling | Header | Sample) -> _Grant | None:
        """The grant that a message is about; a spare one is its lease's from now on."""
        grant = self._grants.get(message.slab)
        if grant is None or grant.number != message.grant:
            return None
        if grant.lease is None and lease != PROBE_LEASE:
            grant.lease, grant.since_s = LeaseId(lease), self._clock()
            self._num_spare -= 1
        return grant if grant.lease == lease else None

    def fill(self, lease: LeaseId, message: Header | Sample) -> bool | None:
        """A slab is said to be filled. Whether that is news; None when it was granted for
        something else. Raises ProtocolError for more bytes than it has.
        """
        grant = self._of(lease, message)
        if grant is None:
            return None
        if grant.message is not None:
            return False
        grant.message, grant.since_s = message, self._clock()
        self.num_filled += 1
        self._check_size(grant.nbytes)
        return True

    def being_filled(self, message: Filling) -> tuple[Slab, memoryview | Stream] | None:
        """A slab that its sender fills now, and what to follow that by; None when it was granted
        for something else, or cannot be followed. Raises ProtocolError for more bytes than it has.
        """
        nbytes, grant = message.header.nbytes, self._of(message.header.lease, message)
        if grant is None or grant.message is not None:
            return None
        by = self._inlet.progress(message.slab, message.grant, nbytes)
        if by is None:
            return None
        self._check_size(nbytes)
        return self._inlet.slab(message.slab)[:nbytes], by

    def filled(self) -> list[Header | Sample]:
        """In the order in which they were granted."""
        if not self.num_filled:
            return []
        return [grant.message for grant in self._grants.values() if grant.message is not None]

    def has_landed(self, message: Header | Sample) -> bool:
        """Whether the bytes are all here. Raises LinkLost when the path broke."""
        grant = self._grants[message.slab]
        if not grant.has_landed and (grant.is_pulled or not self._inlet.is_pulled):
            grant.has_landed = self._inlet.arrived(message.slab, grant.number, grant.nbytes)
            if grant.has_landed:
                grant.since_s = self._clock()
                self._num_posted -= grant.is_pulled
        return grant.has_landed

    def to_pull(self) -> list[Header | Sample]:
        """Those whose receives may be posted now."""
        if not self._inlet.is_pulled:
            return []
        grants = (grant for grant in self._grants.values() if not grant.is_pulled)
        ready = [grant.message for grant in grants if grant.message is not None]
        return ready[: PULLS - self._num_posted]

    def pull(self, message: Header | Sample) -> None:
        """Post its receive; the sender must be told in the same order. Raises LinkLost."""
        grant = self._grants[message.slab]
        self._inlet.pull(message.slab, grant.number, grant.nbytes)
        grant.is_pulled = True
        self._num_posted += 1

    def bytes_of(self, message: Header | Sample) -> Slab:
        return self._inlet.slab(message.slab)[: self._grants[message.slab].nbytes]

    def take_back(self, slab: int, number: int) -> bool:
        """Free a slab, unless the grant is over already or bytes are bound to land in it."""
        grant = self._grants.get(slab)
        if grant is None or grant.number != number or grant.is_posted:
            return False
        del self._grants[slab]
        self._num_spare -= grant.lease is None
        self.num_filled -= grant.message is not None
        self._free.append(slab)
        return True

    def waited_s(self, message: Header | Sample) -> float:
        """Since its bytes are here."""
        return self._clock() - self._grants[message.slab].since_s

    def overdue_in_s(self, to_fill_s: float, to_land_s: float) -> float:
        """Seconds until something has waited too long; infinity while nothing waits.

        Raises LinkLost when bytes or a message have been waited for too long: they were lost, and
        only a new link can tell which slabs are whose.
        """
        left_s = math.inf
        now = self._clock()
        for grant in self._grants.values():
            if grant.lease is None:
                continue
            limit_s = to_fill_s if grant.message is None else to_land_s
            rest_s = grant.since_s + limit_s - now
            if rest_s <= 0 and not grant.has_landed:
                lost = "use of a granted slab" if grant.message is None else "bytes of a slab"
                raise LinkLost(f"no {lost} for {limit_s:g} s")
            left_s = min(left_s, rest_s)
        return left_s

    def close(self) -> None:
        self._inlet.close()

    def _check_size(self, nbytes: int) -> None:
        if not 0 < nbytes <= self._slab_bytes:
            raise ProtocolError(f"{nbytes} bytes in a slab of {self._slab_bytes}")
