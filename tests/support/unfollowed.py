"""A KV memory whose packs nobody follows: base of those that tests put between."""

from __future__ import annotations


class Unfollowed:
    def followed_from(self, *_: object) -> None: ...

    def follow(self, *_: object) -> None:
        """As of a memory that cannot."""
