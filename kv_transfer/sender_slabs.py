"""Slab memory of a receiver, as long as it is granted to this side of a link.

    pushed      GRANTED -> FLYING -> SENT (Header, unless it is sealed) -> acknowledged, or damaged
    pulled      GRANTED -> SENT (Header) -> FLYING (at its Pull) -> acknowledged, or damaged

A slab whose transfer has ended is given back once it is no longer in flight. A Pull is honoured
even then: the receiver has posted for it. A damaged slab waits for another grant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kernels.kv_pack.progress import Progress
from kvferry.kernels.kv_pack.tiles import most_tiles
from kvferry.kv_transfer.credits import Credits
from kvferry.kv_transfer.granted_slab import GrantedSlab, Stage
from kvferry.kv_transfer.handshake import Greeted
from kvferry.kv_transfer.jobs import Reason
from kvferry.kv_transfer.memory import Form, KvMemory
from kvferry.kv_transfer.messages import (
    Ack,
    Credit,
    Pull,
    Resend,
    Return,
    Spare,
)
from kvferry.kv_transfer.outbox import Outbox
from kvferry.kv_transfer.outgoing import Ready, Transfer, TransferTable
from kvferry.kv_transfer.plan import SlabMove, slab_nbytes


class GrantedSlabs:
    """The slabs that one session holds; all of it belongs to the link's thread."""

    def __init__(
        self,
        greeted: Greeted,
        memory: KvMemory,
        table: TransferTable,
        outbox: Outbox,
        clock: Callable[[], float],
        stuck_s: float,
    ) -> None:
        """``stuck_s``: a slab in flight for so long never arrives."""
        self._outlet = greeted.outlet
        self._digest = greeted.digest
        self._memory = memory
        self._table = table
        self._outbox = outbox
        self._clock = clock
        self._stuck_s = stuck_s
        self.credits = Credits(greeted.num_slabs)
        self._held: dict[int, GrantedSlab] = {}
        """By grant."""
        self._to_pack: deque[GrantedSlab] = deque()
        self._leaving: list[GrantedSlab] = []
        """Of transfers that have ended, to be given back."""
        self._announced: dict[int, tuple[int, int]] = {}
        """slab -> (grant, nbytes) of its last header."""

    @property
    def in_flight(self) -> bool:
        """Whether something is on its way that ``land`` has to look after."""
        return bool(self._leaving) or any(
            held.stage is Stage.FLYING for held in self._held.values()
        )

    def use_spares(self, transfer: Transfer) -> None:
        """Give memory that was granted ahead to the slabs of a transfer."""
        while transfer.unsent and (spare := self.credits.take()) is not None:
            self.grant(spare, transfer)

    def grant(self, credit: Credit | Spare, transfer: Transfer) -> None:
        """Give memory to the next slab of a transfer that has one ready."""
        held = GrantedSlab(credit.slab, credit.grant, transfer, transfer.unsent.popleft())
        self._held[credit.grant] = held
        self._to_pack.append(held)

    def give_back(self, credit: Credit) -> None:
        """A credit that is not used."""
        self._outbox.put(Return(slab=credit.slab, grant=credit.grant))

    def pack(self) -> bool:
        """Fill the granted slabs, while the data path moves those before them.

        Whether all of their transfers go on.
        """
        sound = True
        while self._to_pack:
            held = self._to_pack.popleft()
            if self._pack(held):
                self._depart(held)
                self.land()
            else:
                sound = False
        return sound

    def pull(self, pull: Pull) -> None:
        """The receiver has posted for a slab, so it gets one, whatever became of the transfer.

        Raises ProtocolError for a slab that was not announced, or pulled before, LinkLost.
        """
        grant, nbytes = self._announced.pop(pull.slab, (None, 0))
        if not self._outlet.is_pulled or grant != pull.grant:
            raise ProtocolError("a pull of a slab that was not announced")
        held = self._held.get(pull.grant)
        if held is not None:
            self._table.moved(held.transfer)
            self._push(held)
        else:
            self._outlet.push(pull.slab, pull.grant, nbytes)

    def land(self) -> None:
        """Announce pushed slabs that have arrived, those of a transfer in order; give back those of
        ended transfers. Raises LinkLost when the path broke, or has swallowed a slab.
        """
        blocked: set[int] = set()
        for held in self._held.values():
            lease = held.transfer.job.lease
            if held.stage is not Stage.FLYING or lease in blocked:
                continue
            if self._is_flying(held):
                blocked.add(lease)
                continue
            held.stage = Stage.SENT
            held.transfer.account.wire_s += self._clock() - held.pushed_s
            self._table.moved(held.transfer)
            if not self._outlet.is_pulled and not held.is_sealed:
                self.announce(held)
        staying = []
        for held in self._leaving:
            if self._is_flying(held):
                staying.append(held)
            else:
                self._outbox.put(Return(slab=held.slab, grant=held.grant))
        self._leaving = staying

    def _is_flying(self, held: GrantedSlab) -> bool:
        if not self._outlet.in_flight(held.slab):
            return False
        if held.stage is Stage.FLYING and self._clock() - held.pushed_s > self._stuck_s:
            # Its memory may not be used again on this link, and others wait for it.
            raise LinkLost(f"a slab is in flight for {self._stuck_s:g} s")
        return True

    def settle(self, answer: Ack | Resend) -> Transfer | None:
        """The receiver has done with a grant: the transfer that it was for, if it is live.

        An answer that names another slab than the grant holds is one to an earlier use of its
        number, over a link that is gone.
        """
        held = self._held.get(answer.grant)
        if held is None or held.stage is Stage.GRANTED or not held.transfer.is_live:
            return None
        if (held.transfer.job.lease, held.index) != (answer.lease, answer.index):
            return None
        del self._held[answer.grant]
        return held.transfer

    def of(self, transfer: Transfer) -> list[GrantedSlab]:
        return [held for held in self._held.values() if held.transfer is transfer]

    def announce(self, held: GrantedSlab) -> None:
        """Send a header, or send it again; of a slab that is still in flight it will be sent."""
        if held.stage is Stage.SENT:
            self._outbox.put(held.header)
        held.is_sealed = False

    def drop(self, transfer: Transfer) -> None:
        """A transfer has ended: give its slabs back, as soon as may be."""
        for held in self.of(transfer):
            self._leaving.append(self._held.pop(held.grant))

    def close(self) -> None:
        """The link is gone."""
        self._outlet.close()

    def _pack(self, held: GrantedSlab) -> bool:
        """Fill a slab. False when the transfer is over, be it that a block was given away."""
        transfer = held.transfer
        if not self._table.begin_pack(transfer):
            return False
        ready = transfer.slabs[held.index]
        is_sound = False
        try:
            if self._memory.is_fresh(transfer.job.blocks, ready.move):
                is_sound = self._fill(held, ready)
        finally:
            goes_on = self._table.finish_pack(transfer)
        if goes_on and not is_sound:
            self._table.fail(transfer, Reason.STALE, "a block was given away")
        return goes_on and is_sound

    def _fill(self, held: GrantedSlab, ready: Ready) -> bool:
        """Whether the slab holds what it should: no block was given away meanwhile."""
        transfer, move = held.transfer, ready.move
        job, account = transfer.job, transfer.account
        form = Form(job.wire, self._digest)
        slab = self._outlet.slab(held.slab)[: move.nbytes]
        started_s = self._clock()
        progress = self._progress(held, ready)
        self._outbox.flush()
        held.digests = self._memory.pack(job.blocks, move, form, slab, ready.after, progress)
        is_sound = self._memory.is_fresh(job.blocks, move)
        if is_sound and held.is_sealed and progress is not None:
            progress.seal(held.digests)
        busy_s = self._clock() - started_s
        account.busy_s += busy_s
        account.nbytes += move.nbytes
        if transfer.computed_s is None:
            transfer.overlapped_s += busy_s
        return is_sound

    def followed_from(self, transfer: Transfer) -> int | None:
        """From how many bytes on a receiver with such a cache as ours scatters slabs of this
        transfer while they are filled; None: never.
        """
        job, parts = transfer.job, transfer.owed.parts
        if not parts or not self._outlet.is_followed:
            return None
        part, head_bytes = parts[0], transfer.owed.head_bytes
        nbytes = slab_nbytes(head_bytes, part.layers, part.heads, job.tokens)
        whole = SlabMove(0, part.layers, part.heads, job.tokens, nbytes)
        return self._memory.followed_from(job.blocks, whole, Form(job.wire, self._digest))

    def _progress(self, held: GrantedSlab, ready: Ready) -> Progress | None:
        """What the receiver may follow the pack by, where that is of use; it is told so."""
        least_bytes, nbytes = held.transfer.followed_from, ready.move.nbytes
        if least_bytes is None or nbytes < least_bytes:
            return None
        by = self._outlet.progress(held.slab, held.grant, nbytes)
        if by is None:
            return None
        progress = Progress(by, held.grant)
        held.is_sealed = progress.can_seal(most_tiles(nbytes))
        self._outbox.put(held.filling)
        return progress

    def _depart(self, held: GrantedSlab) -> None:
        """A slab is filled."""
        if self._outlet.is_pulled:
            self._announced[held.slab] = (held.grant, held.move.nbytes)
            held.stage = Stage.SENT
            self._outbox.put(held.header)
        else:
            self._push(held)

    def _push(self, held: GrantedSlab) -> None:
        held.stage, held.pushed_s = Stage.FLYING, self._clock()
        self._outlet.push(held.slab, held.grant, held.move.nbytes)
