"""What excuses what: without one of these faults, none of these things may happen."""

from __future__ import annotations

from kvferry.kv_transfer.jobs import Reason

_PEERS = {"worker_dies", "worker_pauses"}
_WIRES = {"wire_goes_bad", "slabs_stick"}
_LEASES = {"renewals_stop", "router_pauses", "session_breaks", "router_dies", "blocks_given_away"}

_SLOW = {"all_is_slow", "meddling"}

LINK_LOST = _PEERS | _WIRES | _SLOW | {"link_breaks"}

FAILED: dict[Reason, set[str]] = {
    Reason.TIMEOUT: _PEERS | _WIRES | _SLOW,
    Reason.DAMAGED: {"wire_goes_bad"},
    Reason.STALE: {"blocks_given_away", "wire_goes_bad", "leases_mixed_up"},
    Reason.UNKNOWN: {"wire_goes_bad", "leases_mixed_up"},
    Reason.DEADLINE: _PEERS | _LEASES | _SLOW | {"leases_mixed_up"},
    Reason.REFUSED: {"worker_dies", "wire_goes_bad"},
    Reason.MISMATCH: {"wire_goes_bad", "leases_mixed_up"},
    Reason.CLOSED: set(),
    Reason.INTERNAL: set(),
    Reason.FOREIGN: set(),
    Reason.DUPLICATE: set(),
}
"""Reasons of one side. What the peer gave up (ABORTED, ENDED) has its reason there."""
