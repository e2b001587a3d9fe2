"""A sender that proved itself and then breaks the rules costs its own link, and no one else's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_link import ScriptedLink

from kvferry.kv_transfer.jobs import Reason, ReceiveDone
from kvferry.kv_transfer.messages import Abort, Header, Proof, Return


@pytest.fixture
def link(make_pair) -> Iterator[ScriptedLink]:
    pair = make_pair()
    pair.expect()
    with ScriptedLink(pair) as link:
        yield link


def test_a_slab_that_was_not_granted_is_foreign(link: ScriptedLink) -> None:
    credit = link.offer()
    link.send(Header(slab=credit.slab, grant=credit.grant + 1, header=link.header()))
    link.send(Header(slab=credit.slab + 1, grant=credit.grant, header=link.header()))
    link.send(Header(slab=10**6, grant=credit.grant, header=link.header()))
    link.send(Header(slab=credit.slab, grant=credit.grant, header=link.header(lease=2)))
    link.send(Return(slab=credit.slab + 1, grant=credit.grant))
    link.send(Return(slab=10**6, grant=7))
    link.offer()
    assert link.pair.receiver.counters == {Reason.FOREIGN: 4}
    link.pair.received.assert_none()
    assert not link.pair.target.slots.any()


def test_a_slab_beyond_its_memory_closes_the_link(link: ScriptedLink) -> None:
    credit = link.offer()
    header = link.header(tokens=(5, 150), nbytes=145 * 128)
    link.send(Header(slab=credit.slab, grant=credit.grant, header=header))
    link.assert_closed()
    link.pair.received.assert_none()
    assert not link.pair.target.slots.any()


def test_an_abort_of_another_attempt_changes_nothing(link: ScriptedLink) -> None:
    link.offer()
    link.send(Abort(key=link.pair.key(attempt=7), lease=1, reason=Reason.ABORTED))
    link.send(Abort(key=link.pair.key(), lease=3, reason=Reason.ABORTED))
    link.offer()
    link.pair.received.assert_none()


def test_a_returned_credit_is_granted_again(link: ScriptedLink) -> None:
    credits = [link.offer() for _ in range(link.num_slabs)]
    assert len({credit.slab for credit in credits}) == link.num_slabs
    link.send(Return(slab=credits[0].slab, grant=credits[0].grant))
    again = link.offer()
    assert again.slab == credits[0].slab
    assert again.grant not in {credit.grant for credit in credits}


def test_a_peer_that_falls_silent_loses_the_link_and_not_the_lease(make_pair) -> None:
    pair = make_pair(silence_s=0.3, beat_s=0.1)
    pair.expect()
    with ScriptedLink(pair) as link:
        link.offer()
        link.assert_closed()
    pair.received.assert_none()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)


def test_a_second_proof_closes_the_link(link: ScriptedLink) -> None:
    link.send(Proof(nonce=b"n" * 32, mac=b"m" * 32, incarnation=1, rank=0, digests=["xxh3"]))
    link.assert_closed()
