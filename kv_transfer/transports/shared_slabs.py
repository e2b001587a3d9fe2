"""A data path whose two ends are one memory: what is packed there is there for the receiver."""

from __future__ import annotations

from kvferry.core.errors import ProtocolError


class SharedSlabs:
    """Inlet and outlet of a link alike, but for where the slabs lie."""

    is_pulled = False
    is_device = False
    is_followed = False

    def push(self, slab: int, grant: int, nbytes: int) -> None:
        """Nothing to do: the pack has ended, and the receiver reads the same memory."""

    def in_flight(self, slab: int) -> bool:
        return False

    def grant(self, slab: int, grant: int) -> None:
        """Nothing to do: who writes under which grant is the links' business."""

    def pull(self, slab: int, grant: int, nbytes: int) -> None:
        raise ProtocolError("shared memory is not pulled")

    def progress(self, slab: int, grant: int, nbytes: int) -> memoryview | None:
        return None

    def arrived(self, slab: int, grant: int, nbytes: int) -> bool:
        return True
