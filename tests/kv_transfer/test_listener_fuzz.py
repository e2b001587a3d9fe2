"""Random conversations with a listener, and random frames on a data stream against a model."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_link import ScriptedLink
from strangers import BAD_INPUT, framed, is_closed_by_peer, open_socket, wrong_proof

from kvferry.core.errors import LinkLost
from kvferry.core.ids import AttemptKey, Incarnation, RequestId
from kvferry.kv_transfer.endpoints import connect, listen
from kvferry.kv_transfer.frames import encode
from kvferry.kv_transfer.jobs import ReceiveDone, ReceiveFailed, SendDone
from kvferry.kv_transfer.messages import (
    Ack,
    Beat,
    Challenge,
    Credit,
    Header,
    Measure,
    Message,
    Offer,
    Pull,
    Return,
    Sample,
    SlabHeader,
)
from kvferry.kv_transfer.transports.tcp_listener import DATA

COUNTS = st.one_of(st.integers(0, 5), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1]))
KEYS = st.builds(
    AttemptKey, st.just(Incarnation(9)), st.builds(RequestId, st.integers(1, 2)), st.integers(1, 2)
)
PAIRS = st.tuples(COUNTS, COUNTS)
TEXT = st.text(max_size=200)
HEADERS = st.builds(
    SlabHeader,
    key=KEYS,
    lease=COUNTS,
    index=COUNTS,
    layers=PAIRS,
    heads=PAIRS,
    tokens=PAIRS,
    wire=TEXT,
    chain_hash=st.binary(max_size=64),
    nbytes=COUNTS,
    digests=st.lists(st.integers(-(2**63), 2**64 - 1), max_size=5),
)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Offer, key=KEYS, lease=COUNTS, slabs=COUNTS, nbytes=COUNTS),
    st.builds(Header, slab=COUNTS, grant=COUNTS, header=HEADERS),
    st.builds(Sample, slab=COUNTS, grant=COUNTS, index=COUNTS, nbytes=COUNTS, digest=COUNTS),
    st.builds(Return, slab=COUNTS, grant=COUNTS),
    st.builds(Measure, slabs=st.integers(1, 4096)),
    st.builds(Beat),
    # What a receiver says, and no sender.
    st.builds(Ack, lease=COUNTS, index=COUNTS, grant=COUNTS),
    st.builds(Credit, lease=COUNTS, slab=COUNTS, grant=COUNTS),
    st.builds(Pull, slab=COUNTS, grant=COUNTS),
    st.builds(Challenge, protocol=COUNTS, nonce=st.binary(min_size=32, max_size=32)),
)
PIECES = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(framed),
    st.builds(wrong_proof, st.binary(min_size=32, max_size=32)).map(framed),
    MESSAGES.map(encode).map(framed),
    st.builds(lambda whole, cut: whole[:cut], MESSAGES.map(encode).map(framed), st.integers(1, 30)),
    st.builds(lambda length: struct.pack("!I", length), st.integers(0, 2**32 - 1)),
    st.sampled_from(list(BAD_INPUT.values())),
)


@dataclass
class Target:
    """A receiver under attack, and a good sender to it."""

    pair: Any
    attempts: int = 0

    def assert_works(self) -> None:
        self.attempts += 1
        names = {"lease": 100 + self.attempts, "attempt": 100 + self.attempts}
        self.pair.expect(**names)
        self.pair.send(**names)
        while (event := self.pair.received.next()).lease != names["lease"]:
            assert isinstance(event, ReceiveFailed)  # the peer's own doing
        assert isinstance(event, ReceiveDone)
        assert isinstance(self.pair.sent.next(), SendDone)
        self.pair.assert_equal()


@pytest.fixture(params=["shm", "tcp"])
def target(request: pytest.FixtureRequest, pairs_over: Any) -> Target:
    return Target(pairs_over(request.param)(silence_s=0.5, beat_s=0.1))


def test_random_conversations_of_strangers(target: Target) -> None:
    endpoint = target.pair.receiver.endpoints[0]

    @settings(max_examples=60)
    @given(st.lists(PIECES, max_size=4), st.sampled_from([None, b"", DATA]))
    def converse(pieces: list[bytes], greeting: bytes | None) -> None:
        with open_socket(endpoint, greeting) as sock:
            with suppress(OSError):  # shown out before it had said everything
                for piece in pieces:
                    sock.sendall(piece)
                sock.shutdown(socket.SHUT_WR)
            assert is_closed_by_peer(sock)

    converse()
    target.assert_works()


def test_random_conversations_of_a_peer(target: Target) -> None:
    """It has proved itself, and then says anything at all."""
    lives = iter(range(1000, 2000))

    @settings(max_examples=30)
    @given(st.lists(MESSAGES, max_size=12))
    def converse(messages: list[Message]) -> None:
        with ScriptedLink(target.pair, incarnation=next(lives)) as link, suppress(LinkLost):
            for message in messages:
                link.send(message)
                link.channel.receive(0.0)

    target.pair.expect(lease=1)
    converse()
    assert not target.pair.target.slots.any()
    target.assert_works()


SLABS, SLAB = 3, 4096
FRAME = struct.Struct("!QIQ")


@dataclass
class Model:
    """What an inlet must make of grants and frames that come one after another."""

    granted: dict[int, int] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)
    """Slabs."""
    memory: bytearray = field(default_factory=lambda: bytearray(SLABS * SLAB))
    last_grant: int = 0
    broken: bool = False

    def grant(self, slab: int) -> int:
        self.last_grant += 1
        self.granted[slab] = self.last_grant
        self.landed.discard(slab)
        return self.last_grant

    def frame(self, grant: int, slab: int, content: bytes) -> None:
        current = self.granted.get(slab, 0)
        if not 0 < len(content) <= SLAB or slab > SLABS or not 0 < current >= grant:
            self.broken = True
        elif grant == current and slab not in self.landed:
            self.landed.add(slab)
            self.memory[slab * SLAB : slab * SLAB + len(content)] = content


ACTIONS = st.one_of(
    st.tuples(st.just("grant"), st.integers(0, SLABS - 1)),
    st.tuples(
        st.just("frame"),
        st.sampled_from([*range(SLABS), SLABS + 1, 2**32 - 1]),
        st.sampled_from([0, 0, 0, -1, -2, 1, 2**63]),
        st.sampled_from([1, 10, SLAB - 1, SLAB, SLAB, SLAB + 1, 0]),
        st.integers(0, 255),
    ),
)


@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=5, max_size=25))
def test_an_inlet_does_with_any_frames_what_the_model_does(actions: list[tuple[Any, ...]]) -> None:
    listener = listen("tcp")
    sender = connect(listener.endpoint, 5.0)
    receiver = listener.accept(5.0)
    assert receiver is not None
    inlet = receiver.open_inlet(SLABS + 1, SLAB, 5.0)
    token, _ = msgspec.msgpack.decode(sender.receive(5.0) or b"", type=tuple[bytes, int])
    model = Model()

    def settle() -> None:
        """Until all frames so far have been dealt with: the last slab is for this alone."""
        inlet.grant(SLABS, grant := model.grant(SLABS))
        stream.sendall(FRAME.pack(grant, SLABS, 1) + b"x")
        deadline = time.monotonic() + 20
        while not inlet.arrived(SLABS, grant, 1):
            assert time.monotonic() < deadline
            receiver.receive(0.1)

    with (
        open_socket(listener.endpoint, DATA + token) as stream,
        suppress(ConnectionError, LinkLost),
    ):
        for action, slab, *more in actions:
            if action == "grant":
                settle()
                inlet.grant(slab, model.grant(slab))
                continue
            change, nbytes, byte = more
            grant = max(0, model.granted.get(slab, 0) + change)
            content = bytes([byte]) * nbytes
            stream.sendall(FRAME.pack(grant, slab, nbytes) + content)
            model.frame(grant, slab, content)
            if model.broken:
                break
        settle()
        assert not model.broken
    memory = b"".join(bytes(inlet.slab(slab)) for slab in range(SLABS))
    for each in (inlet, sender, receiver, listener):
        each.close()
    assert memory == bytes(model.memory)
