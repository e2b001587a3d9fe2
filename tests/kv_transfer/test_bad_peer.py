"""A sender that proved itself and then breaks the rules costs its own link, and no one else's."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lease_table import LAYOUT, MOVES, NBYTES, TOKENS, Leases, header, key
from receiver_bench import Bench
from scripted_link import ScriptedLink

from kvferry.core.errors import LinkLost, ProtocolError
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, ReceiveFailed
from kvferry.kv_transfer.messages import (
    Abort,
    Ack,
    Beat,
    Credit,
    Header,
    Measure,
    Message,
    Offer,
    Proof,
    Return,
    Sample,
)


@pytest.fixture
def link(make_pair) -> Iterator[ScriptedLink]:
    pair = make_pair(spare_slabs=0)
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


def test_a_peer_that_was_restarted_does_not_go_on_with_its_old_attempt(make_pair) -> None:
    """Nor does its old life with a new one: a lease belongs to whoever offers first."""
    pair = make_pair()
    pair.expect()
    with ScriptedLink(pair, incarnation=1) as old, ScriptedLink(pair, incarnation=2) as new:
        credit = new.offer()
        old.send(Offer(key=pair.key(), lease=1, slabs=1, nbytes=1))
        refused = old.next()
        assert isinstance(refused, Abort)
        assert refused.reason is Reason.STALE
        old.send(Header(slab=credit.slab, grant=credit.grant, header=old.header()))
        old.send(Abort(key=pair.key(), lease=1, reason=Reason.ABORTED))
        old.send(Offer(key=pair.key(), lease=1, slabs=1, nbytes=1))
        assert isinstance(old.next(), Abort)
        assert pair.receiver.counters == {Reason.STALE: 2, Reason.FOREIGN: 1}
        assert isinstance(new.offer(), Credit)
    pair.received.assert_none()


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


MESSAGES: list[Message] = [
    Offer(key=key(), lease=1, slabs=2, nbytes=NBYTES),
    Header(slab=5, grant=1, header=header(MOVES[0])),
    Sample(slab=4, grant=2, index=0, nbytes=8, digest=0),
    Return(slab=5, grant=1),
    Abort(key=key(), lease=1, reason=Reason.ABORTED),
    Measure(slabs=1),
    Beat(),
    Proof(nonce=b"n" * 32, mac=b"m" * 32, incarnation=1, rank=0, digests=["xxh3"]),
]
ODD = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 4097, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0.5, None]),
    st.sampled_from(["", "float16", "x" * 300, b"", b"x" * 70, True, {}, float("nan")]),
    st.lists(st.integers(-1, 2**63), max_size=4),
    st.integers(0, 40),
)


def fields(message: Message) -> list[tuple[str, ...]]:
    """The paths to all fields of a message, and one to a field that it does not have."""
    names = [(name,) for name in (*message.__struct_fields__, "more")]
    if isinstance(message, Header):
        names += [("header", name) for name in message.header.__struct_fields__]
    return names


PLACES = [(message, path) for message in MESSAGES for path in fields(message)]


def changed(message: Message, path: tuple[str, ...], value: Any) -> bytes:
    """A frame with another value at one field."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    part = plain
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    body = msgspec.msgpack.encode(plain)
    return body + zlib.crc32(body).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("message", "path"), PLACES, ids=lambda x: type(x).__name__ if isinstance(x, Message) else x[-1]
)
@settings(max_examples=25)
@given(value=ODD)
def test_odd_values_in_any_field_cost_that_link_alone(message, path, value) -> None:
    """Whatever it takes them for, it neither raises anything else nor harms another link."""
    leases = Leases()
    leases.expect()
    leases.expect(attempt=2, lease=2)
    bad, good = Bench(leases), Bench(leases, rank=3)
    bad.offer(1)
    bad.hear(Measure(slabs=1))
    credits = good.hear(Offer(key=key(2), lease=2, slabs=len(MOVES), nbytes=NBYTES))
    try:
        bad.link.handle(changed(message, path, value))
        bad.turn()
    except (ProtocolError, LinkLost):
        bad.link.close()
    for credit, move in zip(credits, MOVES, strict=True):
        said = good.fill(credit, move.index, lease=2, attempt=2)
        assert said == [Ack(lease=2, index=move.index, grant=credit.grant)]
    ended = {event.lease: event for event in leases.events}
    assert len(ended) == len(leases.events)
    assert isinstance(ended[2], ReceiveDone)
    assert isinstance(ended.get(1, ended[2]), ReceiveFailed | ReceiveDone)
    for move in bad.memory.moves:
        assert move.tokens.within(TOKENS)
        assert move.layers.within(LAYOUT.whole.layers)
        assert move.heads.within(LAYOUT.whole.heads)
