"""What a link is made of: an ordered control channel and slab memory. Transports know no blocks and
no requests.

The receiver listens and owns the slab memory; the sender connects and fills slabs. One thread owns
a channel and calls all of it, except ``wake``, which any thread may call.
"""

from __future__ import annotations

from typing import Protocol

from kvferry.kv_transfer.messages import MAX_FRAME


class Staging(Protocol):
    """The slab memory of one link.

    Never used again for another link, so a peer that writes late harms nobody.
    """

    def slab(self, index: int) -> memoryview:
        """Writable bytes of one slab."""
        ...

    def close(self) -> None: ...


class Channel(Protocol):
    """One side of a link."""

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

    def grant_staging(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Staging:
        """Receiver's side, once: make slab memory and hand it to the peer."""
        ...

    def accept_staging(self, num_slabs: int, slab_bytes: int, timeout_s: float) -> Staging:
        """Sender's side, once: take the peer's slab memory.

        Raises LinkLost when none comes, ProtocolError when it is not what was announced.
        """
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Listener(Protocol):
    """Where links to a receiver begin."""

    @property
    def endpoint(self) -> str:
        """``scheme:name``, for ``connect``."""
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
