"""A listener meets strangers: bad input costs them their own connection, and no one else's."""

from __future__ import annotations

import os
import pickle
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.core.errors import LinkLost, LinkRefused
from kvferry.kv_transfer.endpoints import connect
from kvferry.kv_transfer.handshake import introduce
from kvferry.kv_transfer.jobs import Reason, ReceiveDone, SendDone, SendFailed
from kvferry.kv_transfer.messages import (
    MAX_HANDSHAKE_FRAME,
    Abort,
    Beat,
    Credit,
    Header,
    Message,
    Offer,
    Proof,
    Return,
    SlabHeader,
    decode_to_sender,
    encode,
)
from kvferry.kv_transfer.receiver import MAX_STRANGERS


class Marker:
    """Unpickling it would leave a trace."""

    touched = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (setattr, (Marker, "touched", True))


def framed(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


BAD_INPUT = {
    "random": random.Random(1).randbytes(5000),
    "huge length": struct.pack("!I", 1 << 30) + b"x" * 100,
    "zero length": struct.pack("!I", 0),
    "above the handshake's limit": framed(b"x" * (MAX_HANDSHAKE_FRAME + 1)),
    "pickle": framed(pickle.dumps(Marker())),
    "bare pickle": pickle.dumps(Marker()),
    "no proof first": framed(encode(Beat())),
    "wrong proof": framed(encode(Proof(nonce=b"n" * 32, mac=b"m" * 32, incarnation=1))),
    "garbage in a frame": framed(b"\xc1" * 40),
    "half a message": framed(b"x" * 40)[:-1],
    "half a length": b"\0\0",
    "http": b"GET / HTTP/1.1\r\n\r\n",
}


def open_socket(endpoint: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20.0)
    sock.connect("\0" + endpoint.removeprefix("shm:"))
    return sock


def is_closed_by_peer(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def assert_works(pair: Any) -> None:
    pair.expect()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    assert isinstance(pair.sent.next(), SendDone)
    pair.assert_equal()


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_closes_that_connection_alone(make_shm_pair, name: str) -> None:
    pair = make_shm_pair(silence_s=0.3)
    with open_socket(pair.receiver.endpoint) as sock:
        sock.sendall(BAD_INPUT[name])
        assert is_closed_by_peer(sock)
    assert not Marker.touched
    assert_works(pair)


def test_a_stranger_who_says_nothing_is_shown_out(make_shm_pair) -> None:
    pair = make_shm_pair(silence_s=0.3)
    with open_socket(pair.receiver.endpoint) as sock:
        assert is_closed_by_peer(sock)
    assert_works(pair)


def test_strangers_at_once_are_bounded_and_do_not_stay(make_shm_pair) -> None:
    pair = make_shm_pair(silence_s=0.3)
    crowd = [open_socket(pair.receiver.endpoint) for _ in range(MAX_STRANGERS + 10)]
    try:
        assert is_closed_by_peer(crowd[-1])
        for sock in crowd:
            assert is_closed_by_peer(sock)
        assert_works(pair)
    finally:
        for sock in crowd:
            sock.close()


def test_bad_input_on_a_live_link_fails_no_other_link(make_shm_pair) -> None:
    pair = make_shm_pair()
    pair.expect()
    with open_link(pair) as link:
        link.channel.send(b"\xc1", 1.0)
        link.assert_closed()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)
    pair.assert_equal()


def test_a_wrong_secret_is_refused(make_pair) -> None:
    pair = make_pair()
    stranger = make_pair(secret=b"another secret")
    stranger.send(endpoint=pair.receiver.endpoint)
    event = stranger.sent.next()
    assert (type(event), event.reason) == (SendFailed, Reason.REFUSED)
    assert "secret" in event.detail
    assert_works(pair)


def test_a_receiver_must_know_the_secret_too(make_pair) -> None:
    """A receiver that takes any proof still cannot make the sender trust it."""
    pair = make_pair()
    channel = connect(pair.receiver.endpoint, 1.0)
    relayed = RelabelledChannel(channel)
    with pytest.raises(LinkRefused, match="secret"):
        introduce(relayed, pair.options)
    channel.close()


class RelabelledChannel:
    """A man in the middle that changes the receiver's proof."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self.send = channel.send

    def receive(self, *arguments: Any) -> bytes | None:
        frame = self._channel.receive(*arguments)
        if frame is not None:
            message = decode_to_sender(frame)
            if type(message).__name__ == "Welcome":
                fields = {name: getattr(message, name) for name in message.__struct_fields__}
                return encode(type(message)(**(fields | {"mac": b"x" * 32})))
        return frame


def test_when_slab_memory_is_all_given_out_a_further_link_is_refused(make_pair) -> None:
    pair = make_pair(staging_bytes=3 * 8192)
    links = [open_link(pair) for _ in range(2)]
    try:
        assert [link.num_slabs for link in links] == [2, 1]
        pair.send()
        event = pair.sent.next()
        assert (event.reason, "slab memory" in event.detail) == (Reason.REFUSED, True)
    finally:
        for link in links:
            link.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            open_link(pair).close()
            break
        except LinkRefused:
            assert time.monotonic() < deadline
            time.sleep(0.01)


class ScriptedLink:
    """A sender that follows no rules."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair
        self.channel = connect(pair.receiver.endpoint, 5.0)
        try:
            greeted = introduce(self.channel, pair.options)
        except LinkLost:
            self.channel.close()
            raise
        self.staging, self.num_slabs = greeted.staging, greeted.num_slabs

    def __enter__(self) -> ScriptedLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def send(self, message: Message) -> None:
        self.channel.send(encode(message), 5.0)

    def next(self) -> Message:
        """The next message that is no beat."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            frame = self.channel.receive(1.0)
            if frame is not None and not isinstance(message := decode_to_sender(frame), Beat):
                return message
        raise AssertionError("the receiver says nothing")

    def assert_closed(self) -> None:
        deadline = time.monotonic() + 20
        try:
            while time.monotonic() < deadline:
                self.channel.receive(1.0)
        except LinkLost:
            return
        raise AssertionError("the receiver keeps the link")

    def offer(self) -> Credit:
        nbytes = self.pair.tokens.length * self.pair.source.layout.token_bytes
        self.send(Offer(key=self.pair.key(), lease=1, slabs=1, nbytes=nbytes))
        credit = self.next()
        assert isinstance(credit, Credit)
        return credit

    def header(self, **changes: Any) -> SlabHeader:
        values = {
            "key": self.pair.key(),
            "lease": 1,
            "index": 0,
            "count": 1,
            "layers": (0, 1),
            "heads": (0, 2),
            "tokens": (5, 6),
            "flavour": "float32",
            "chain_hash": b"h" * 16,
            "nbytes": 128,
            "digests": [0],
        }
        return SlabHeader(**(values | changes))


open_link: Callable[[Any], ScriptedLink] = ScriptedLink


@pytest.fixture
def link(make_pair) -> Iterator[ScriptedLink]:
    pair = make_pair()
    pair.expect()
    with open_link(pair) as link:
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
    with open_link(pair) as link:
        link.offer()
        link.assert_closed()
    pair.received.assert_none()
    pair.send()
    assert isinstance(pair.received.next(), ReceiveDone)


def test_a_second_proof_closes_the_link(link: ScriptedLink) -> None:
    link.send(Proof(nonce=os.urandom(32), mac=os.urandom(32), incarnation=1))
    link.assert_closed()
