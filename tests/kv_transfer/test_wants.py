"""Slabs that leases are owed, in turn."""

from __future__ import annotations

from lease_table import key

from kvferry.core.ids import LeaseId
from kvferry.kv_transfer.wants import Wants

A, B = LeaseId(1), LeaseId(2)


def serve(wants: Wants) -> list[int]:
    """Whose turn it is, until nothing is wanted."""
    order = []
    while wants:
        lease, _ = wants.first()
        wants.served(lease)
        order.append(int(lease))
    return order


def test_leases_take_turns() -> None:
    wants = Wants()
    wants.offer(A, key(1), 3)
    wants.offer(B, key(2), 1)
    assert wants.first() == (A, key(1))
    assert serve(wants) == [A, B, A, A]


def test_the_last_offer_counts() -> None:
    wants = Wants()
    wants.offer(A, key(1), 3)
    wants.offer(A, key(1), 1)
    assert serve(wants) == [A]
    wants.offer(A, key(1), 0)
    assert not wants


def test_a_damaged_slab_is_owed_whatever_is_offered() -> None:
    wants = Wants()
    wants.add_again(A, key(1))
    wants.offer(A, key(1), 0)
    assert serve(wants) == [A]
    wants.offer(A, key(1), 1)
    wants.add_again(A, key(1))
    wants.served(A)
    wants.offer(A, key(1), 2)
    assert serve(wants) == [A, A]


def test_another_attempt_begins_anew() -> None:
    wants = Wants()
    wants.add_again(A, key(1))
    wants.offer(A, key(2), 1)
    assert wants.first() == (A, key(2))
    assert serve(wants) == [A]


def test_an_attempt_is_forgotten_by_its_own_key_alone() -> None:
    wants = Wants()
    wants.offer(A, key(1), 2)
    wants.forget(A, key(2))
    wants.forget(B, key(1))
    assert wants
    wants.forget(A, key(1))
    assert not wants
