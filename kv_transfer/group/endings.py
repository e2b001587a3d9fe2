"""The last words of several transfers that are one to whoever asked for them. Pure.

One key stands for all pairs of ranks. It has succeeded when each has; the first that has not
decides how it ended, and the rest are then to be given up. It is over only after the last word of
all: some pack or scatter may be using its blocks until then.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from kvferry.kv_transfer.jobs import (
    Account,
    ReceiveDone,
    ReceiveEvent,
    SendDone,
    SendEvent,
)

E = TypeVar("E", bound=SendEvent | ReceiveEvent)


class Word(NamedTuple, Generic[E]):
    """What a last word means for the whole."""

    ended: E | None
    """How it ended, if this was the last one."""
    is_first_bad: bool
    """Whether the others have to be given up now."""


@dataclass(slots=True)
class _Pending(Generic[E]):
    left: int
    account: Account
    bad: E | None = None


class Endings(Generic[E]):
    """``key_of``: what names the whole of which an event is a part."""

    def __init__(self, key_of: Callable[[E], Hashable]) -> None:
        self._key_of = key_of
        self._pending: dict[Hashable, _Pending[E]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pending

    def expect(self, key: Hashable, count: int) -> None:
        """So many last words are to come. Raises ValueError for a key that is under way."""
        if key in self._pending:
            raise ValueError(f"{key} is under way already")
        self._pending[key] = _Pending(count, Account())

    def add(self, event: E) -> Word[E]:
        """Raises KeyError for an event of nothing that was expected."""
        key = self._key_of(event)
        pending = self._pending[key]
        pending.left -= 1
        is_first_bad = False
        if isinstance(event, SendDone | ReceiveDone):
            pending.account = merged(pending.account, event.account)
        elif pending.bad is None:
            is_first_bad = True
            pending.bad = event
        if pending.left:
            return Word(None, is_first_bad)
        del self._pending[key]
        return Word(pending.bad or _with_account(event, pending.account), False)


def merged(one: Account, other: Account) -> Account:
    """Two parts that ran side by side: bytes and busy seconds add up, spans of time overlap."""
    names = dict.fromkeys(filter(None, (*one.transport.split("+"), other.transport)))
    return Account(
        transport="+".join(names),
        nbytes=one.nbytes + other.nbytes,
        busy_s=one.busy_s + other.busy_s,
        wire_s=one.wire_s + other.wire_s,
        credit_s=one.credit_s + other.credit_s,
        wall_s=max(one.wall_s, other.wall_s),
        exposed_s=max(one.exposed_s, other.exposed_s),
        resends=one.resends + other.resends,
    )


def _with_account(event: E, account: Account) -> E:
    """An event of a whole that went through."""
    return replace(event, account=account)  # type: ignore[arg-type]
