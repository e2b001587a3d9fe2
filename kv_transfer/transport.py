"""What a link is made of: an ordered control channel, and a data path that moves slabs.

Transports know no blocks and no requests. The receiver listens; the sender connects. One thread
owns a channel with its data path and calls all of it, except ``wake``, which any thread may call. A
data path that works on threads of its own calls ``wake`` when a push has ended, a slab has arrived
or the path has broken; one without moves its slabs in ``receive``, ``in_flight`` and ``arrived``.

    receiver                                sender
    open_inlet(slabs)                       open_outlet(slabs)
    inlet.grant(slab, grant)   ─ Credit ─▶
    may scatter meanwhile      ◀─ Filling ─ (where packs can be followed: see ``progress``)
                                            pack into outlet.slab(slab)

    pushed (shm, loopback, cuda_ipc, tcp, nixl):
                                            outlet.push(slab, grant, nbytes)
                                            until not outlet.in_flight(slab)
    until inlet.arrived(...)   ◀─ Header ─  (unless it was followed, and is sealed)
    scatter from inlet.slab(slab)

    pulled (gloo, nccl: nothing may be posted that has no partner):
                               ◀─ Header ─
    inlet.pull(slab, grant, nbytes)
                               ─ Pull ───▶  outlet.push(slab, grant, nbytes)
    until inlet.arrived(...)
    scatter from inlet.slab(slab)

Slab i of the outlet and slab i of the inlet are the two ends of one path, or one memory. A sender
fills a slab only under a grant, and gives the grant back, or has it acknowledged, only once the
slab is no longer in flight: so nothing ever lands in a slab that has another use.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvferry.kernels.kv_pack.progress import Stream
from kvferry.kv_transfer.messages import MAX_FRAME

Slab = Any
"""Bytes of one slab: a writable memoryview, or on a device a flat torch.uint8 tensor."""


class Outlet(Protocol):
    """The sender's end of a data path."""

    @property
    def is_pulled(self) -> bool:
        """Whether ``push`` must wait for the receiver's Pull, and keep the order of the Pulls."""
        ...

    @property
    def is_device(self) -> bool:
        """Whether slabs are tensors on a device rather than memoryviews."""
        ...

    def slab(self, index: int) -> Slab:
        """All bytes of one slab."""
        ...

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        """Begin to move the first ``nbytes`` of a slab. Does not wait. Raises LinkLost."""
        ...

    def in_flight(self, slab: int) -> bool:
        """Whether its last push still reads the slab, or has yet to be seen by the receiver's
        memory. Raises LinkLost when the path broke.
        """
        ...

    @property
    def is_followed(self) -> bool:
        """Whether the receiver may scatter slabs while they are filled."""
        ...

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | Stream | None:
        """Begin to fill a slab, and what its receiver follows that by: see ``Progress``. ``push``
        must come next; without it the slab is in flight until its bytes, whatever they are, are
        gone. None: it does not follow this one. Raises LinkLost.
        """
        ...

    def close(self) -> None: ...


class Inlet(Protocol):
    """The receiver's end of a data path. Its slabs are never used again for another link, so a
    peer that writes late harms nobody.
    """

    @property
    def is_pulled(self) -> bool: ...

    @property
    def is_device(self) -> bool: ...

    def slab(self, index: int) -> Slab:
        """All bytes of one slab."""
        ...

    def grant(self, slab: int, grant: int) -> None:
        """From now on bytes may arrive in this slab under this grant, once, and under no other.
        Numbers only rise.
        """
        ...

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        """Post the receive of a slab. Does not wait. Raises LinkLost."""
        ...

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        """Whether the first ``nbytes`` that this grant was for are all here; stays so until the
        next ``grant`` of the slab. Raises LinkLost when the path broke or other bytes than these
        came.
        """
        ...

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | Stream | None:
        """What a scatter follows the filling of a slab by; None: it cannot, now at least."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """One side of a link."""

    @property
    def transport(self) -> str:
        """Name of the transport, for accounting."""
        ...

    def send(self, frame: bytes, timeout_s: float) -> None:
        """Raises LinkLost when the peer is gone or takes nothing for ``timeout_s``."""
        ...

    def receive(self, timeout_s: float, limit: int = MAX_FRAME) -> bytes | None:
        """The next frame; None after ``timeout_s`` or a wake.

        Raises LinkLost when the peer is gone or stops inside a frame, ProtocolError for a frame
        above ``limit``.
        """
        ...

    def wake(self) -> None:
        """Make a receive that runs now, or else the next one, return early. Legal after close."""
        ...

    def open_inlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Inlet:
        """Receiver's side, once, after both sides have proved themselves. Raises LinkLost,
        ProtocolError.
        """
        ...

    def open_outlet(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Outlet:
        """Sender's side, once, after both sides have proved themselves.

        Raises LinkLost when the peer opens nothing, ProtocolError when it is not what was
        announced.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Listener(Protocol):
    """Where links to a receiver begin."""

    @property
    def endpoint(self) -> str:
        """``scheme:address``, for ``connect``."""
        ...

    def accept(self, timeout_s: float) -> Channel | None:
        """The next link; None after ``timeout_s`` or a stop."""
        ...

    def stop(self) -> None:
        """Take no more links; an accept that waits returns. Any thread may call it."""
        ...

    def close(self) -> None: ...


class Connect(Protocol):
    """Opens a link to an endpoint."""

    def __call__(self, endpoint: str, timeout_s: float) -> Channel:
        """Raises LinkRefused when nobody listens there, LinkLost when there is no answer."""
        ...
