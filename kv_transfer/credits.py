"""The slab memory that a receiver has granted to one session, before it is used."""

from __future__ import annotations

from kvferry.core.errors import ProtocolError
from kvferry.kv_transfer.messages import Credit, Spare


class Credits:
    """All of it belongs to the link's thread."""

    def __init__(self, num_slabs: int) -> None:
        self._last_grants = [0] * num_slabs
        """The newest of each slab."""
        self._spares: list[Spare] = []

    def is_new(self, credit: Credit | Spare) -> bool:
        """Whether this credit, or a later one for its slab, did not come before.

        Raises ProtocolError for a slab that is not there.
        """
        if credit.slab >= len(self._last_grants):
            raise ProtocolError(f"a credit for slab {credit.slab} of {len(self._last_grants)}")
        if credit.grant <= self._last_grants[credit.slab]:
            return False
        self._last_grants[credit.slab] = credit.grant
        return True

    def keep(self, spare: Spare) -> None:
        """For a slab that stands ready later."""
        self._spares.append(spare)

    def take(self) -> Spare | None:
        """The newest that was kept: its bytes may still be in the processor's cache."""
        return self._spares.pop() if self._spares else None
