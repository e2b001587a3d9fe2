"""A KV memory whose packs nobody follows: base of those that tests put between."""

from __future__ import annotations


class Unfollowed:
    def can_follow(self, *_: object) -> bool:
        return False

    def follow(self, *_: object) -> None:
        raise AssertionError("can_follow said no")
