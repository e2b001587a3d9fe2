"""How a link begins: who the sender is, which digest both use, what is refused and told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import KvferryError, LinkLost, LinkRefused, ProtocolError
from kvferry.core.ids import Incarnation
from kvferry.kv_transfer import handshake
from kvferry.kv_transfer.frames import decode_to_receiver, decode_to_sender, encode, tag_of
from kvferry.kv_transfer.handshake import Admitted, Greeted, LinkOptions
from kvferry.kv_transfer.messages import MAX_LINK_BYTES, Challenge, Message, Refused, Welcome
from kvferry.kv_transfer.transports.loopback import LoopbackListener

SENDER = LinkOptions(secret=b"s" * 32, incarnation=Incarnation(3), silence_s=2.0)
RECEIVER = LinkOptions(secret=b"s" * 32, incarnation=Incarnation(4), silence_s=2.0, slab_bytes=4096)


class Sides:
    """Two ends of a link."""

    def __init__(self) -> None:
        self.listener = LoopbackListener()
        self.sender: Any = self.listener.dial()
        self.receiver: Any = self.listener.accept(1.0)
        self.found: list[Any] = []

    def run(self, receive: Callable[[], object], send: Callable[[], object]) -> tuple[Any, Any]:
        """What each side ends with: what it returns, or the error."""
        thread = threading.Thread(target=lambda: self.found.append(outcome(receive)))
        thread.start()
        sent = outcome(send)
        thread.join(20.0)
        return self.found[0], sent

    def admit(self, digests: list[str], num_slabs: int = 2) -> Admitted:
        proof = handshake.challenge(self.receiver, RECEIVER)
        digest = handshake.agree(self.receiver, RECEIVER, proof, digests)
        return handshake.welcome(self.receiver, RECEIVER, proof, digest, num_slabs)

    def introduce(self, digests: list[str], rank: int = 0) -> Greeted:
        return handshake.introduce(self.sender, SENDER, rank, digests)


def outcome(side: Callable[[], object]) -> object:
    try:
        return side()
    except KvferryError as error:
        return error


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.sender.close()
    sides.listener.close()


def test_both_sides_learn_who_the_other_is_and_what_was_agreed(sides: Sides) -> None:
    admitted, greeted = sides.run(
        lambda: sides.admit(["b", "a"], num_slabs=3), lambda: sides.introduce(["a", "b"], rank=5)
    )
    assert (admitted.peer, admitted.rank) == (Incarnation(3), 5)
    assert greeted.peer == Incarnation(4)
    for side in (admitted, greeted):
        assert (side.num_slabs, side.slab_bytes) == (3, 4096)
        # The receiver's best, of those that the sender has.
        assert side.digest == "b"
    greeted.outlet.slab(2)[:3] = b"abc"
    assert bytes(admitted.inlet.slab(2)[:3]) == b"abc"


def test_the_receivers_next_best_digest_is_taken(sides: Sides) -> None:
    admitted, greeted = sides.run(
        lambda: sides.admit(["cuda", "xxh3"]), lambda: sides.introduce(["xxh3", "old"])
    )
    assert (admitted.digest, greeted.digest) == ("xxh3", "xxh3")


def test_without_a_common_digest_there_is_no_link(sides: Sides) -> None:
    received, sent = sides.run(lambda: sides.admit(["cuda"]), lambda: sides.introduce(["xxh3"]))
    assert isinstance(received, LinkRefused)
    assert isinstance(sent, LinkRefused)
    assert "digest" in str(sent)
    assert "cuda" in str(sent)


def test_a_digest_that_was_not_on_offer_is_not_taken(sides: Sides) -> None:
    def receive() -> None:
        proof = handshake.challenge(sides.receiver, RECEIVER)
        handshake.welcome(sides.receiver, RECEIVER, proof, "none", 1)

    _, sent = sides.run(receive, lambda: sides.introduce(["xxh3"]))
    assert isinstance(sent, ProtocolError)


@pytest.mark.parametrize(
    "first",
    [
        Challenge(protocol=1, nonce=b"n" * 32),
        Refused(detail="go away"),
        Welcome(mac=b"m" * 32, incarnation=1, slab_bytes=4096, num_slabs=1, digest="xxh3"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_another_protocol_is_refused(sides: Sides, first: Message) -> None:
    sides.receiver.send(encode(first), 1.0)
    assert isinstance(outcome(lambda: sides.introduce(["xxh3"])), LinkRefused)


def test_a_welcome_without_knowledge_of_the_secret_is_refused(sides: Sides) -> None:
    def receive() -> None:
        handshake.challenge(sides.receiver, RECEIVER)
        message = Welcome(mac=b"m" * 32, incarnation=1, slab_bytes=4096, num_slabs=1, digest="xxh3")
        sides.receiver.send(encode(message), 1.0)

    _, sent = sides.run(receive, lambda: sides.introduce(["xxh3"]))
    assert isinstance(sent, LinkRefused)
    assert "secret" in str(sent)


class Meddler:
    """A man in the middle, who changes one field of a message and leaves the rest."""

    def __init__(self, channel: Any, field: str, value: object) -> None:
        self._channel, self._change = channel, {field: value}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, frame: bytes, timeout_s: float) -> None:
        if tag_of(frame) == "proof":
            frame = encode(msgspec.structs.replace(decode_to_receiver(frame), **self._change))
        elif tag_of(frame) == "welcome":
            frame = encode(msgspec.structs.replace(decode_to_sender(frame), **self._change))
        self._channel.send(frame, timeout_s)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonce", b"x" * 32),
        ("incarnation", 9),
        ("rank", 1),
        ("digests", ["xxh3"]),
        ("is_probe", True),
    ],
)
def test_nobody_on_the_way_can_change_a_proof(sides: Sides, field: str, value: object) -> None:
    sides.sender = Meddler(sides.sender, field, value)
    received, sent = sides.run(
        lambda: sides.admit(["xxh3"]), lambda: sides.introduce(["xxh3", "other"])
    )
    assert isinstance(received, LinkRefused)
    assert "secret" in str(received)
    assert isinstance(sent, LinkRefused)


@pytest.mark.parametrize(
    ("field", "value"),
    [("incarnation", 9), ("slab_bytes", 8192), ("num_slabs", 1), ("digest", "other")],
)
def test_nobody_on_the_way_can_change_a_welcome(sides: Sides, field: str, value: object) -> None:
    sides.receiver = Meddler(sides.receiver, field, value)
    _, sent = sides.run(lambda: sides.admit(["xxh3"]), lambda: sides.introduce(["xxh3", "other"]))
    assert isinstance(sent, LinkRefused)
    assert "secret" in str(sent)


def test_no_link_has_a_sender_set_aside_more_than_its_limit(sides: Sides) -> None:
    greedy = replace(RECEIVER, slab_bytes=MAX_LINK_BYTES // 2 + 1)
    inlets: list[object] = []

    def receive() -> None:
        proof = handshake.challenge(sides.receiver, greedy)
        channel = Unopened(sides.receiver, inlets)
        handshake.welcome(channel, greedy, proof, "xxh3", 2)

    _, sent = sides.run(receive, lambda: sides.introduce(["xxh3"]))
    assert isinstance(sent, ProtocolError)
    assert "2 slabs" in str(sent)


class Unopened:
    """A channel whose data path takes no memory."""

    def __init__(self, channel: Any, inlets: list[object]) -> None:
        self._channel, self._inlets = channel, inlets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def open_inlet(self, *shape: Any) -> list[object]:
        return self._inlets


def test_whoever_closes_waits_for_no_answer(sides: Sides) -> None:
    patient = replace(SENDER, silence_s=60.0)
    sides.sender.wake()
    sent = outcome(
        lambda: handshake.introduce(sides.sender, patient, 0, ["xxh3"], is_closing=lambda: True)
    )
    assert isinstance(sent, LinkLost)


def test_a_peer_that_says_nothing_is_given_up(sides: Sides) -> None:
    quick = LinkOptions(secret=b"s" * 32, incarnation=Incarnation(4), silence_s=0.05)
    mute = sides.sender
    assert isinstance(outcome(lambda: handshake.introduce(mute, quick, 0, ["xxh3"])), LinkLost)
    assert isinstance(outcome(lambda: handshake.challenge(sides.receiver, quick)), LinkLost)
