"""The life of a lease, the same on both sides of a transfer: one table, one transition function.

    state     event     next
    WAITING   offer     OFFERED
    WAITING   complete  DONE
    WAITING   close     CLOSED
    WAITING   fail      FAILED
    WAITING   lost      WAITING
    WAITING   renew     WAITING
    OFFERED   offer     OFFERED
    OFFERED   copy      COPYING
    OFFERED   complete  DONE
    OFFERED   close     CLOSED
    OFFERED   fail      FAILED
    OFFERED   lost      WAITING
    OFFERED   renew     OFFERED
    COPYING   offer     COPYING
    COPYING   copied    OFFERED
    COPYING   close     CLOSING
    COPYING   fail      FAILING
    COPYING   renew     COPYING
    CLOSING   copied    CLOSED
    CLOSING   close     CLOSING
    CLOSING   fail      CLOSING
    CLOSING   renew     CLOSING
    FAILING   copied    FAILED
    FAILING   close     FAILING
    FAILING   fail      FAILING
    FAILING   renew     FAILING
    DONE      close     DONE
    DONE      fail      DONE
    DONE      lost      DONE
    DONE      renew     DONE
    CLOSED    close     CLOSED
    CLOSED    fail      CLOSED
    CLOSED    lost      CLOSED
    CLOSED    renew     CLOSED
    FAILED    close     FAILED
    FAILED    fail      FAILED
    FAILED    lost      FAILED
    FAILED    renew     FAILED

                receiver (``leases.LeaseTable``)         sender (``outgoing.TransferTable``)
    WAITING     the prompt is being computed             nothing is ready, or no link is open
    OFFERED     slabs are granted, or on their way       the same
    COPYING     a slab is scattered into the blocks      a slab is packed out of the blocks
    CLOSING     released, once the scatter has returned  aborted, once the pack has returned
    FAILING     failed, once the scatter has returned    failed, once the pack has returned
    DONE        all is verified                          all is acknowledged
    CLOSED      released                                 aborted
    FAILED      deadline, abort by the peer, damaged     refused, abort by the peer, no progress,
                twice, block given away, mismatch,       block given away, mismatch, shutdown
                shutdown

Close, fail and renew are legal in every state, the first ending counts. A pair that is not in the
table is a defect of this side, whatever the peer says: what a peer asks for is checked first and,
if it cannot be, answered and counted instead. The blocks of a lease may be given away once it is
DONE, CLOSED or FAILED, and not before.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    WAITING = "WAITING"
    OFFERED = "OFFERED"
    COPYING = "COPYING"
    CLOSING = "CLOSING"
    FAILING = "FAILING"
    DONE = "DONE"
    CLOSED = "CLOSED"
    FAILED = "FAILED"

    @property
    def is_live(self) -> bool:
        """Whether slabs still move for it."""
        return self in _LIVE

    @property
    def is_copying(self) -> bool:
        """Whether a pack or a scatter may be touching its blocks."""
        return self in _COPYING

    @property
    def is_ended(self) -> bool:
        return self in _ENDED


class Event(StrEnum):
    OFFER = "offer"
    """Receiver: a sender stands ready. Sender: the receiver is told so."""
    COPY = "copy"
    """A pack or a scatter begins."""
    COPIED = "copied"
    """It has returned, however it went."""
    COMPLETE = "complete"
    LOST = "lost"
    """Sender: its link is gone, what was in flight is forgotten."""
    RENEW = "renew"
    """The deadline moves."""
    CLOSE = "close"
    """Receiver: release. Sender: abort."""
    FAIL = "fail"


_LIVE = frozenset({State.WAITING, State.OFFERED, State.COPYING})
_COPYING = frozenset({State.COPYING, State.CLOSING, State.FAILING})
_ENDED = frozenset({State.DONE, State.CLOSED, State.FAILED})

TABLE: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.OFFER): State.OFFERED,
    (State.WAITING, Event.COMPLETE): State.DONE,
    (State.WAITING, Event.CLOSE): State.CLOSED,
    (State.WAITING, Event.FAIL): State.FAILED,
    (State.WAITING, Event.LOST): State.WAITING,
    (State.OFFERED, Event.OFFER): State.OFFERED,
    (State.OFFERED, Event.COPY): State.COPYING,
    (State.OFFERED, Event.COMPLETE): State.DONE,
    (State.OFFERED, Event.CLOSE): State.CLOSED,
    (State.OFFERED, Event.FAIL): State.FAILED,
    (State.OFFERED, Event.LOST): State.WAITING,
    (State.COPYING, Event.OFFER): State.COPYING,
    (State.COPYING, Event.COPIED): State.OFFERED,
    (State.COPYING, Event.CLOSE): State.CLOSING,
    (State.COPYING, Event.FAIL): State.FAILING,
    (State.CLOSING, Event.COPIED): State.CLOSED,
    (State.FAILING, Event.COPIED): State.FAILED,
}
# The first ending counts, and an ended lease has no link to lose.
TABLE |= {
    (state, event): state
    for state in (*_ENDED, State.CLOSING, State.FAILING)
    for event in (Event.CLOSE, Event.FAIL)
}
TABLE |= {(state, Event.LOST): state for state in _ENDED}
TABLE |= {(state, Event.RENEW): state for state in State}


def advance(state: State, event: Event) -> State:
    """The next state. Raises RuntimeError for a pair that is not in the table."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise RuntimeError(f"{event} in state {state}") from None
